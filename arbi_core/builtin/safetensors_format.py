"""Checkpoint format ``safetensors``: a Hugging Face model directory, single or sharded, read lazily from the map."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbi_core.api import hookimpl
from arbi_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from arbi_core.loader.base import Checkpoint, CheckpointFormat, TensorSource, TokenizerParts

__all__ = ["SafetensorsCheckpoint", "SafetensorsFormat"]

arbi_api_version = 1

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class SafetensorsFormat:
    """See `arbi_core.loader.base.CheckpointFormat`."""

    name = "safetensors"

    def detect(self, path: Path) -> bool:
        """A directory with a ``config.json``."""
        return path.is_dir() and (path / "config.json").is_file()

    def open(self, path: Path) -> Checkpoint:
        """Open the directory; tensors are looked at when they are asked for."""
        return SafetensorsCheckpoint(path)


class _Source:
    """One tensor of one file."""

    encoding = "dense"

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, file: _File) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._file = file

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Read all of it, or a slice along one dimension."""
        handle = self._file.handle()
        if dim is None:
            tensor: torch.Tensor = handle.get_tensor(self.name)
            return tensor
        stop = self.shape[dim] if length is None else start + length
        index = (slice(None),) * dim + (slice(start, stop),)
        part: torch.Tensor = handle.get_slice(self.name)[index]
        return part


class _File:
    """A safetensors file, mapped when first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = None
        self._lock = threading.Lock()

    def header(self) -> dict[str, Any]:
        """The parsed header. Raises `CheckpointError` for anything that is not a whole safetensors file."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                if size < 8 or length > size - 8:
                    raise CheckpointError(
                        f"{self.path} is truncated or not a safetensors file: its header needs {length + 8} bytes and "
                        f"the file has {size}"
                    )
                header: dict[str, Any] = json.loads(f.read(length))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is missing; the index names it as a shard of the model") from None
        except (ValueError, UnicodeDecodeError) as exc:
            raise CheckpointError(f"{self.path} has a corrupt header: {exc}") from exc
        end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        if 8 + length + end > size:
            raise CheckpointError(
                f"{self.path} is truncated: its tensors need {8 + length + end} bytes and the file has {size}"
            )
        return header

    def handle(self) -> Any:
        """The mapped file."""
        with self._lock:
            if self._handle is None:
                from safetensors import SafetensorError, safe_open

                try:
                    self._handle = safe_open(str(self.path), framework="pt", device="cpu")
                except SafetensorError as exc:
                    raise CheckpointError(f"{self.path} cannot be read: {exc}") from exc
            return self._handle

    def close(self) -> None:
        """Drop the map."""
        self._handle = None


class SafetensorsCheckpoint:
    """See `arbi_core.loader.base.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, _File] = {}
        self._tensors: dict[str, TensorSource] | None = None

    def config(self) -> Mapping[str, Any]:
        """``config.json``."""
        return read_json(self.path / "config.json", required=True)

    def generation_config(self) -> Mapping[str, Any]:
        """``generation_config.json``, or nothing."""
        return read_json(self.path / "generation_config.json")

    def tokenizer(self) -> TokenizerParts | None:
        """From ``tokenizer.json`` and its neighbours."""
        from arbi_core.loader.hf_tokenizer import read_tokenizer

        return read_tokenizer(self.path)

    def tensors(self) -> Mapping[str, TensorSource]:
        """Every tensor of every shard."""
        if self._tensors is None:
            self._tensors = self._scan()
        return self._tensors

    def close(self) -> None:
        """Drop all maps."""
        for file in self._files.values():
            file.close()

    def _scan(self) -> dict[str, TensorSource]:
        index_path = self.path / INDEX
        index = read_json(index_path).get("weight_map") if index_path.is_file() else None
        if index is not None:
            names = sorted(set(index.values()))
        else:
            names = sorted(p.name for p in self.path.glob("*.safetensors"))
            if not names:
                raise CheckpointError(self._nothing_found())
        tensors: dict[str, TensorSource] = {}
        for name in names:
            file = self._files[name] = _File(self.path / name)
            for key, entry in file.header().items():
                if key == "__metadata__":
                    continue
                if index is not None and index.get(key) != name:
                    continue
                dtype = DTYPES.get(entry["dtype"])
                if dtype is None:
                    raise CheckpointError(
                        f"{file.path}: tensor {key} has dtype {entry['dtype']}, which is not supported"
                    )
                tensors[key] = _Source(key, tuple(entry["shape"]), dtype, file)
        if index is not None:
            absent = sorted(set(index) - set(tensors))
            if absent:
                raise CheckpointError(
                    f"{index_path} names {len(absent)} tensors that its shards do not hold, for example "
                    f"{absent[0]} in {index[absent[0]]}"
                )
        return tensors

    def _nothing_found(self) -> str:
        if any(self.path.glob("*.bin")) or any(self.path.glob("*.pth")):
            return (
                f"{self.path} holds pickled weights only (.bin or .pth), which can run code when read; convert them to "
                "safetensors"
            )
        return f"{self.path} has a config.json but no .safetensors file; --load-format dummy makes random weights"


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object; a missing optional file is empty. Raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise CheckpointError(f"{path} is missing") from None
        return {}
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


@hookimpl
def arbi_checkpoint_formats() -> list[CheckpointFormat]:
    """Offer the format."""
    return [SafetensorsFormat()]
