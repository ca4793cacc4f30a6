"""Parses the header of a GGUF file from a memory map.

The file is little-endian: magic, version, counts, key/value pairs, tensor descriptions, padding, tensor data. The
`gguf` package's own reader takes seconds for the token lists of a tokenizer because it makes one numpy view per string;
this one walks the bytes once. Constants (types, block sizes, enum values) come from the package.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path
from typing import Any

from attrs import frozen
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from arbi_core.api import CheckpointError

__all__ = ["GGUFFile", "TensorInfo"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@frozen
class TensorInfo:
    """Where a tensor's bytes are.

    Attributes:
        name: name in the file.
        shape: rows first (the file stores it the other way round).
        kind: quantisation type.
        offset: first byte in the file.
        nbytes: length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last dimension."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size


class GGUFFile:
    """An opened file: metadata, tensor descriptions and the map of its bytes.

    Raises:
        CheckpointError: not a GGUF file, a version nobody reads, or truncated; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes")
        with path.open("rb") as f:
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._parse()
        except struct.error:
            raise CheckpointError(f"{path} is truncated inside its header ({size} bytes)") from None

    def close(self) -> None:
        """Drop the map unless tensors still view it."""
        with contextlib.suppress(BufferError):  # arrays that view the map keep it alive; it goes with the last of them
            self.map.close()

    def _parse(self) -> None:
        if self.map[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {self.map[:4]!r}")
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}; versions {VERSIONS} are read")
        tensor_count, kv_count = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(kv_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        described = [self._describe() for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        base = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in described:
            self.tensors[name] = self._locate(name, shape, kind, base + offset)

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("<I")
        shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _locate(self, name: str, shape: tuple[int, ...], raw_kind: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name} has unknown type {raw_kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for d in shape:
            elements *= d
        if not shape or shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name} of shape {shape} does not fit {kind.name} blocks")
        nbytes = elements // block * block_bytes
        if offset + nbytes > len(self.map):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + nbytes} of {len(self.map)}"
            )
        return TensorInfo(name, shape, kind, offset, nbytes)

    def _scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self.map, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        end = self._at + length
        if end > len(self.map):
            raise CheckpointError(f"{self.path} is truncated inside its header")
        raw = self.map[self._at : end]
        self._at = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: a string in the header is not UTF-8: {raw[:40]!r}") from None

    def _value(self, kind: int) -> Any:
        try:
            kind = GGUFValueType(kind)
        except ValueError:
            raise CheckpointError(f"{self.path}: a metadata value has unknown type {kind}") from None
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(SCALARS[kind])
        item, count = GGUFValueType(self._scalar("<I")), self._scalar("<Q")
        if item == GGUFValueType.STRING:
            return self._strings(count)
        if item == GGUFValueType.ARRAY:
            return [self._value(GGUFValueType.ARRAY) for _ in range(count)]
        fmt = f"<{count}{SCALARS[item][1]}"
        values = list(struct.unpack_from(fmt, self.map, self._at))
        self._at += struct.calcsize(fmt)
        return values

    def _strings(self, count: int) -> list[str]:
        """The hot loop: tokenizers have a hundred thousand of these."""
        buffer, at, unpack = self.map, self._at, struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            (length,) = unpack(buffer, at)
            at += 8 + length
            if at > len(buffer):
                raise CheckpointError(f"{self.path} is truncated inside its header")
            result.append(buffer[at - length : at].decode("utf-8", "surrogateescape"))
        self._at = at
        return result
