"""The calibration file: bases of every layer in one safetensors file, with what they were made of in its header."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from arbi_core.api import ConfigError
from arbi_plugin_tkv.codec.basis import Basis

if TYPE_CHECKING:
    from arbi_core.api import LayerSpec, ParallelSpec

__all__ = ["Bundle", "load_bundle", "save_bundle"]

SCHEMA = "arbi-tkv-calibration-1"
PARTS = ("encode", "decode", "mean", "first")
SIDES = ("key", "value")
NAME = "plugins.tkv.calibration"


@frozen(eq=False)
class Bundle:
    """What a model's calibration says.

    Attributes:
        path: where it was read.
        tensors: ``layers.{index}.{key|value}.{encode|decode|mean|first}``, all heads.
        about: fingerprint of the model, corpus and quality, as the header has them.
    """

    path: str
    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, object]

    def bases(self, layer: LayerSpec, parallel: ParallelSpec) -> tuple[Basis, Basis]:
        """Bases of keys and values of the layer whose cache `layer` reads, for this rank's heads.

        Raises:
            ConfigError: the file is of another model.
        """
        index = layer.index if layer.kv_source_layer is None else layer.kv_source_layer
        heads = parallel.divide(layer.num_kv_heads, "num_key_value_heads")
        own = slice(parallel.rank * heads, (parallel.rank + 1) * heads)
        found = []
        for side, dim in zip(SIDES, (layer.head_dim, layer.value_dim), strict=True):
            names = [f"layers.{index}.{side}.{part}" for part in PARTS]
            if any(name not in self.tensors for name in names):
                raise ConfigError(NAME, f"{self.path} says nothing of layer {index}", "calibrate this model")
            parts = [self.tensors[name] for name in names]
            got = tuple(parts[2].shape)
            if got != (layer.num_kv_heads, dim):
                need = f"{layer.num_kv_heads} heads of {dim} numbers"
                raise ConfigError(
                    NAME,
                    f"{self.path} is of another model: layer {index} has {got}, not {need}",
                    "calibrate this model",
                )
            found.append(Basis(*(part[own].contiguous() for part in parts)))
        return found[0], found[1]


def save_bundle(path: Path, bases: Mapping[int, tuple[Basis, Basis]], about: Mapping[str, object]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: of the file; a file of that name is replaced.
        bases: of keys and values by layer index, of all ranks' heads.
        about: JSON-able facts: the model's fingerprint, the corpus's hash, quality.
    """
    tensors = {
        f"layers.{i}.{side}.{part}": getattr(basis, part).contiguous().clone()
        for i, pair in bases.items()
        for side, basis in zip(SIDES, pair, strict=True)
        for part in PARTS
    }
    header = {"schema": SCHEMA, "layers": str(len(bases)), "sha256": _digest(tensors), "about": json.dumps(about)}
    unfinished = path.with_name(path.name + ".unfinished")
    save_file(tensors, unfinished, metadata=header)
    unfinished.replace(path)


@functools.lru_cache(maxsize=4)
def load_bundle(path: str) -> Bundle:
    """Read a file; a second call for the same path returns the same object.

    Raises:
        ConfigError: there is no such file, or it is not whole, corrupt or of another version.
    """
    fix = "calibrate the model, or leave the setting out"
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, SafetensorError) as exc:
        raise ConfigError(NAME, f"{path} cannot be read: {exc}", fix) from exc
    if header.get("schema") != SCHEMA:
        raise ConfigError(NAME, f"{path} is no calibration file of version {SCHEMA!r}: {header.get('schema')!r}", fix)
    if header.get("sha256") != _digest(tensors):
        raise ConfigError(NAME, f"{path} is corrupt: its tensors do not have the hash that it states", fix)
    return Bundle(path, tensors, json.loads(header.get("about", "{}")))


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
