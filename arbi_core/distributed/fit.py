"""Which numbers of ranks a model can be cut into."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from arbi_core.errors import ConfigError

if TYPE_CHECKING:
    from arbi_core.spec import ModelSpec

__all__ = ["check_fit", "fitting_sizes"]


def fitting_sizes(spec: ModelSpec) -> list[int]:
    """Every number of ranks that divides all query heads and all key/value heads, in order."""
    heads = [h for layer in spec.layers for h in (layer.num_heads, layer.num_kv_heads) if h]
    common = math.gcd(*heads) if heads else 1
    return [n for n in range(1, common + 1) if common % n == 0]


def check_fit(spec: ModelSpec, size: int) -> None:
    """Raise `ConfigError`, with the sizes that would do, if `size` ranks cannot share the model's heads."""
    if size == 1:
        return
    fitting = fitting_sizes(spec)
    if size in fitting:
        return
    counts = sorted({(layer.num_heads, layer.num_kv_heads) for layer in spec.layers if layer.num_heads})
    heads = ", ".join(f"{q} query and {kv} key/value heads" for q, kv in counts)
    raise ConfigError(
        "scheduler.tensor_parallel_size",
        f"{size} ranks cannot share the {heads} of {spec.architecture}",
        f"--tp {' or '.join(map(str, fitting))}",
    )
