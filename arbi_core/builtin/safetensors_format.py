"""Checkpoint format ``safetensors``: a Hugging Face model directory, one file or several, read lazily from the map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from arbi_core.api import hookimpl
from arbi_core.errors import CheckpointError
from arbi_core.loader.json_file import read_json
from arbi_core.loader.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from arbi_core.loader.base import Checkpoint, CheckpointFormat, TensorSource, TokenizerParts

__all__ = ["SafetensorsCheckpoint", "SafetensorsFormat"]

arbi_api_version = 1

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")
PICKLED = ("*.bin", "*.pth", "*.pt", "*.ckpt")


class SafetensorsFormat:
    """See `arbi_core.loader.base.CheckpointFormat`."""

    name = "safetensors"

    def detect(self, path: Path) -> bool:
        """A directory with a ``config.json``."""
        return path.is_dir() and (path / "config.json").is_file()

    def open(self, path: Path) -> Checkpoint:
        """Open the directory; each file in it is looked at when it is asked for."""
        return SafetensorsCheckpoint(path)


class SafetensorsCheckpoint:
    """See `arbi_core.loader.base.Checkpoint`.

    Args:
        path: a Hugging Face model directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[SafetensorsFile] = []
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
        """Every tensor of every shard, in the order of the files."""
        if self._tensors is None:
            index = self._index()
            self._tensors = self._unindexed() if index is None else self._indexed(index)
        return self._tensors

    def close(self) -> None:
        """Drop all maps."""
        for file in self._files:
            file.close()

    def _open(self, name: str) -> dict[str, TensorSource]:
        file = SafetensorsFile(self.path / name)
        self._files.append(file)
        return file.sources()

    def _index(self) -> dict[str, str] | None:
        """Shard of each tensor, or None for a directory without an index."""
        path = self.path / INDEX
        if not path.is_file():
            return None
        index = read_json(path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{path} has no weight_map")
        for tensor, shard in index.items():
            inside = isinstance(shard, str) and shard.endswith(".safetensors")
            if not inside or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
                raise CheckpointError(
                    f"{path} places {tensor} in {shard!r}, which is no .safetensors file of this directory"
                )
        return index

    def _indexed(self, index: dict[str, str]) -> dict[str, TensorSource]:
        shards = sorted(set(index.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path / missing[0]} is missing; the index names it as a shard of the model ({len(missing)} of "
                f"{len(shards)} shards are missing)"
            )
        tensors: dict[str, TensorSource] = {}
        for shard in shards:
            # A tensor that the index does not know stays, so that the weight map can say that it has no place.
            tensors.update((k, source) for k, source in self._open(shard).items() if index.get(k, shard) == shard)
        absent = sorted(set(index) - set(tensors))
        if absent:
            raise CheckpointError(
                f"{self.path / INDEX} names {len(absent)} tensors that its shards do not hold, for example {absent[0]} "
                f"in {index[absent[0]]}"
            )
        return tensors

    def _unindexed(self) -> dict[str, TensorSource]:
        names = sorted(p.name for p in self.path.glob("*.safetensors"))
        if SINGLE in names:
            names = [SINGLE]
        if not names:
            raise CheckpointError(self._nothing_found())
        self._refuse_gaps(names)
        tensors: dict[str, TensorSource] = {}
        owner: dict[str, str] = {}
        for name in names:
            for key, source in self._open(name).items():
                if key in tensors:
                    raise CheckpointError(
                        f"{self.path}: both {owner[key]} and {name} hold {key}, and no {INDEX} says which one "
                        "counts; keep the files of one model only"
                    )
                tensors[key], owner[key] = source, name
        return tensors

    def _refuse_gaps(self, names: list[str]) -> None:
        """Without an index, numbered shards say themselves how many they are."""
        for match in filter(None, map(NUMBERED.fullmatch, names)):
            width = len(match["part"])
            for part in range(1, int(match["parts"]) + 1):
                sibling = f"{match['stem']}-{part:0{width}}-of-{match['parts']}.safetensors"
                if sibling not in names:
                    raise CheckpointError(f"{self.path / sibling} is missing; {match[0]} says that it exists")

    def _nothing_found(self) -> str:
        for pattern in PICKLED:
            for file in sorted(self.path.glob(pattern)):
                return (
                    f"{self.path} holds pickled weights ({file.name}), which can run code when read, and no "
                    ".safetensors file; convert them to safetensors"
                )
        return f"{self.path} has a config.json but no .safetensors file; --load-format dummy makes random weights"


@hookimpl
def arbi_checkpoint_formats() -> list[CheckpointFormat]:
    """Offer the format."""
    return [SafetensorsFormat()]
