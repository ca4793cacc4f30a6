"""One tensor of a GGUF file as arbi's loader sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from arbi_plugin_gguf.header import GGUFFile, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["GGUFSource"]

DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFSource:
    """See `arbi_core.loader.base.TensorSource`.

    Args:
        name: Hugging Face name.
        info: where the bytes are.
        file: the mapped file.
        interleaved_heads: heads whose rows the converter interleaved for pairwise rotation; `load` and `rows` undo
            it. None for tensors that are stored as they are.
    """

    def __init__(self, name: str, info: TensorInfo, file: GGUFFile, interleaved_heads: int | None = None) -> None:
        self.name = name
        self.info = info
        self.shape = info.shape
        kind = info.kind.name
        self.dtype = DENSE.get(kind, "float32")
        self.encoding = "dense" if kind in DENSE else f"gguf:{kind.lower()}"
        self.nbytes = info.nbytes
        self.file_bytes = len(file.map)
        self._file = file
        self._heads = interleaved_heads

    def rows(self, start: int = 0, length: int | None = None) -> np.ndarray:
        """Packed bytes of rows, ``(rows, row_bytes)`` uint8, in Hugging Face order."""
        info = self.info
        total = info.nbytes // info.row_bytes
        stop = total if length is None else start + length
        raw = np.frombuffer(self._file.map, np.uint8, info.nbytes, info.offset).reshape(total, info.row_bytes)
        if self._heads is None:
            return raw[start:stop]
        half = total // self._heads // 2
        order = np.arange(total).reshape(self._heads, half, 2).transpose(0, 2, 1).reshape(-1)
        return raw[order[start:stop]]

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Dequantise all of it, or a slice; a slice of the first dimension touches only its own rows."""
        from arbi_plugin_gguf.dequant import dequantize

        if dim == 0 and len(self.shape) == 2:
            return dequantize(self.rows(start, length), self.info.kind)
        whole = dequantize(self.rows(), self.info.kind).reshape(self.shape)
        if dim is None:
            return whole
        return whole.narrow(dim, start, self.shape[dim] - start if length is None else length)
