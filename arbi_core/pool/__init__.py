"""Memory that requests share: pages with a radix prefix cache, rows of recurrent state, host tiers. Torch-free."""

from arbi_core.pool.cache import Prefix
from arbi_core.pool.pages import PagePool
from arbi_core.pool.rows import RowPool
from arbi_core.pool.table import PageTable, PoolExhausted
from arbi_core.pool.tree import Namespace

__all__ = ["Namespace", "PagePool", "PageTable", "PoolExhausted", "Prefix", "RowPool"]
