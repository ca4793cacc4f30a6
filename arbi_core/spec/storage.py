"""How a backend asks the core for memory. The core knows only two shapes: pages and rows."""

from __future__ import annotations

import math

from attrs import field, frozen
from attrs.validators import ge

__all__ = ["DTYPE_BYTES", "StorageSpec", "TensorSpec"]

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}


@frozen
class TensorSpec:
    """One named tensor of a layer's state.

    Attributes:
        name: unique within the layer.
        shape: shape of ONE page or ONE row; the core prepends the page or row axis.
        dtype: torch dtype name without the ``torch.`` prefix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one page or row."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@frozen
class StorageSpec:
    """State of one layer.

    Attributes:
        pages: tensors per page, shared by the tokens in it.
        rows: tensors per running request.
        fold_grid: for rows: a prefill cut at multiples of this many tokens leaves the same bits as one that was not
            cut; savepoints are taken there only.
    """

    pages: tuple[TensorSpec, ...] = ()
    rows: tuple[TensorSpec, ...] = ()
    fold_grid: int = field(default=1, validator=ge(1))

    @property
    def page_bytes(self) -> int:
        """Bytes that one page costs in this layer."""
        return sum(t.nbytes for t in self.pages)

    @property
    def row_bytes(self) -> int:
        """Bytes that one running request costs in this layer, apart from its pages."""
        return sum(t.nbytes for t in self.rows)
