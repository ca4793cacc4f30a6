"""One safetensors file: its header checked against its size, its tensors read lazily from the map.

Layout: 8 bytes little-endian header length, a JSON header ``name -> {dtype, shape, data_offsets}``, then the data.
Torch-free until a tensor is read.
"""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from attrs import frozen

from arbi_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from arbi_core.loader.base import TensorSource

__all__ = ["SafetensorsFile"]

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Torch dtype name and bytes of each dtype that a header may name."""
MAX_HEADER = 100_000_000
"""Largest header in bytes that the format allows."""
LFS_POINTER = b"version https://git-lfs"


class SafetensorsFile:
    """A file whose header is read by `sources` and whose data is mapped by the first tensor that is loaded.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        self._lock = threading.Lock()

    def sources(self) -> dict[str, TensorSource]:
        """All tensors by name, in the order of the file.

        Raises:
            CheckpointError: the file is missing, truncated, corrupt, or holds a dtype that torch does not have.
        """
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as f:
                start = f.read(len(LFS_POINTER))
                if start == LFS_POINTER:
                    raise CheckpointError(
                        f"{self.path} is a Git LFS pointer and not the file itself; run `git lfs pull` in its directory"
                    )
                length = int.from_bytes(start[:8], "little")
                if size < 8 or length > size - 8 or length > MAX_HEADER:
                    raise CheckpointError(
                        f"{self.path} is truncated or not a safetensors file: it says that its header has {length} "
                        f"bytes, and the file has {size}"
                    )
                f.seek(8)
                raw = f.read(length)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is missing") from None
        except OSError as exc:
            raise CheckpointError(f"{self.path} cannot be read: {exc.strerror}") from exc
        entries = self._parse(raw)
        needed = 8 + length + max((entry.end for entry in entries.values()), default=0)
        if needed > size:
            raise CheckpointError(
                f"{self.path} is truncated: its tensors need {needed} bytes and the file has {size}; download or copy "
                "it again"
            )
        by_offset = sorted(entries.items(), key=lambda item: item[1].start)
        return {name: _Source(name, entry.shape, entry.dtype, self) for name, entry in by_offset}

    def _parse(self, raw: bytes) -> dict[str, _Entry]:
        try:
            header = json.loads(raw)
            if not isinstance(header, dict):
                raise TypeError(f"it holds a JSON {type(header).__name__}")
            return {name: _entry(name, value) for name, value in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, RecursionError) as exc:
            raise CheckpointError(f"{self.path} has a corrupt header: {exc}") from exc

    def handle(self) -> Any:
        """The mapped file, a ``safetensors.safe_open``."""
        with self._lock:
            if self._handle is None:
                from safetensors import SafetensorError, safe_open

                try:
                    self._handle = safe_open(str(self.path), framework="pt", device="cpu")
                except (SafetensorError, OSError) as exc:
                    raise CheckpointError(f"{self.path} cannot be read: {exc}") from exc
            return self._handle

    def close(self) -> None:
        """Drop the map; tensors that were read stay valid."""
        with self._lock:
            self._handle = None


@frozen
class _Entry:
    """One tensor of a header; `start` and `end` count bytes from the first byte of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _entry(name: str, value: Any) -> _Entry:
    """Check one tensor's header entry. Raises `ValueError` or `TypeError` naming the tensor."""
    if not isinstance(value, dict):
        raise TypeError(f"tensor {name} is described by {value!r}")
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if code not in DTYPES:
        raise ValueError(f"tensor {name} has dtype {code!r}, which is not supported")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
    dtype, itemsize = DTYPES[code]
    start, end = offsets
    if end - start != math.prod(shape) * itemsize:
        raise ValueError(f"tensor {name}, {code} {shape}, cannot lie in the {end - start} bytes of {offsets}")
    return _Entry(dtype, tuple(shape), start, end)


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


class _Source:
    """See `arbi_core.loader.base.TensorSource`. What `load` returns is a view of the map."""

    encoding = "dense"

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, file: SafetensorsFile) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._file = file

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Map all of it, or a slice along one dimension; bytes are read when the result is copied."""
        from safetensors import SafetensorError

        handle = self._file.handle()
        try:
            if dim is None:
                whole: torch.Tensor = handle.get_tensor(self.name)
                return whole
            stop = self.shape[dim] if length is None else start + length
            part: torch.Tensor = handle.get_slice(self.name)[(slice(None),) * dim + (slice(start, stop),)]
        except SafetensorError as exc:
            raise CheckpointError(f"{self._file.path}: tensor {self.name} cannot be read: {exc}") from exc
        return part
