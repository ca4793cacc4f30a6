"""Checkpoint format ``gguf``. Torch-free until a tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbi_core.api import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from arbi_core.api import Checkpoint, TensorSource, TokenizerParts
    from arbi_plugin_gguf.header import GGUFFile

__all__ = ["GGUFCheckpoint", "GGUFFormat"]


class GGUFFormat:
    """See `arbi_core.loader.base.CheckpointFormat`."""

    name = "gguf"

    def detect(self, path: Path) -> bool:
        """A file that says so in its name or its first bytes."""
        if not path.is_file():
            return False
        if path.suffix == ".gguf":
            return True
        with path.open("rb") as f:
            return f.read(4) == b"GGUF"

    def open(self, path: Path) -> Checkpoint:
        """Parse the header; tensors are read from the map when they are asked for."""
        from arbi_plugin_gguf.header import GGUFFile

        return GGUFCheckpoint(path, GGUFFile(path))


class GGUFCheckpoint:
    """See `arbi_core.loader.base.Checkpoint`."""

    def __init__(self, path: Path, file: GGUFFile) -> None:
        self.path = path
        self._file = file
        self._config: dict[str, Any] | None = None

    def config(self) -> Mapping[str, Any]:
        """The metadata in Hugging Face terms."""
        if self._config is None:
            from arbi_plugin_gguf.architectures import hf_config

            self._config = hf_config(self._file)
        return self._config

    def generation_config(self) -> Mapping[str, Any]:
        """End tokens."""
        from arbi_plugin_gguf.architectures import generation_config

        return generation_config(self._file.metadata)

    def tensors(self) -> Mapping[str, TensorSource]:
        """Every tensor under its Hugging Face name. Raises for types that cannot be dequantised."""
        from arbi_plugin_gguf.architectures import hf_name, interleaved_heads
        from arbi_plugin_gguf.dequant import SUPPORTED
        from arbi_plugin_gguf.source import GGUFSource

        arch, config = self._file.metadata["general.architecture"], self.config()
        result: dict[str, TensorSource] = {}
        for name, info in self._file.tensors.items():
            if info.kind not in SUPPORTED:
                served = ", ".join(sorted(k.name for k in SUPPORTED))
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has type {info.kind.name}, which is not read (read: {served})"
                )
            mapped = hf_name(name)
            if mapped is None:
                raise CheckpointError(f"{self.path}: tensor {name} has no place in a {arch} model")
            result[mapped] = GGUFSource(mapped, info, self._file, interleaved_heads(name, arch, config))
        return result

    def tokenizer(self) -> TokenizerParts | None:
        """Built from the token lists in the metadata."""
        from arbi_plugin_gguf.tokenizer import build_tokenizer

        return build_tokenizer(self._file.metadata, str(self.path))

    def close(self) -> None:
        """Drop the map."""
        self._file.close()
