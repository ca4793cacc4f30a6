"""Memory that requests share: pages with a radix prefix cache, and rows for recurrent state. Torch-free."""

from arbi_core.pool.pages import PagePool
from arbi_core.pool.rows import RowPool
from arbi_core.pool.table import PageTable, PoolExhausted

__all__ = ["PagePool", "PageTable", "PoolExhausted", "RowPool"]
