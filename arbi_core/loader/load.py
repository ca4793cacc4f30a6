"""Fills a model that was built on the meta device, as its weight map says."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from attrs import frozen
from torch import nn

from arbi_core.errors import WeightError
from arbi_core.loader.base import TensorSource, WeightContext, WeightFormat, WeightPiece
from arbi_core.loader.progress import NoProgress, Progress
from arbi_core.model.linear import LinearBase
from arbi_core.model.loadable import LoadableModule
from arbi_core.spec import WeightMap, WeightShardSpec

__all__ = ["LoadReport", "load_dummy", "load_weights"]

LOAD_THREADS = 4
"""Parameters read and packed at once: more would only raise the peak of memory."""
NAMED = 12
"""Most tensors that one error names one by one."""


@frozen
class LoadReport:
    """What loading did: tensors read, and linears by the weight format that holds them (``dense`` where none does)."""

    tensors: int
    linears: Mapping[str, int]


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    tensors: Mapping[str, TensorSource],
    *,
    ctx: WeightContext,
    weight_formats: Sequence[WeightFormat] = (),
    progress: Progress | None = None,
) -> LoadReport:
    """Read every tensor once and put it where the map says.

    Raises:
        WeightError: tensors are missing, unexpected or misshapen; all of them are found before anything is read.
    """
    progress = progress or NoProgress()
    groups = _group(model, weight_map, tensors)
    progress.start(sum(_nbytes(p.source) for _, _, pieces in groups for p in pieces), "loading weights")
    linears: dict[str, int] = {}

    def load(group: tuple[LoadableModule, str, list[WeightPiece]]) -> list[WeightPiece]:
        module, leaf, pieces = group
        module.load_pieces(leaf, pieces, ctx.device, ctx.dtype)
        return pieces

    for module, leaf, pieces in groups:
        if isinstance(module, LinearBase) and leaf == "weight":
            name = _choose_format(module, pieces, weight_formats, ctx)
            linears[name] = linears.get(name, 0) + 1
    with ThreadPoolExecutor(max_workers=min(LOAD_THREADS, os.cpu_count() or 1)) as pool:
        for pieces in pool.map(load, groups):
            progress.advance(sum(_nbytes(p.source) for p in pieces))
    _check_materialised(model)
    return LoadReport(sum(len(pieces) for *_, pieces in groups), linears)


def load_dummy(model: nn.Module, weight_map: WeightMap, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Fill the model with seeded random weights: norms one, everything else normal with deviation 0.02.

    The same seed gives the same model whatever the number of ranks: a tensor is drawn whole from a generator seeded by
    its name, then cut.
    """
    for module, leaf, specs in _by_parameter(model, weight_map):
        shapes = module.expected_shapes(leaf)
        pieces = [WeightPiece(s, _DummySource(s.source, shapes[s.shard_id], seed, device, dtype)) for s in specs]
        module.load_pieces(leaf, pieces, device, dtype)
    _check_materialised(model)


class _DummySource:
    """A tensor drawn from (seed, name)."""

    encoding = "dense"

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, str(dtype).removeprefix("torch.")
        self._device, self._torch_dtype = device, dtype
        self._seed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Draw it, and cut."""
        if len(self.shape) == 1:
            whole = torch.ones(self.shape, device=self._device, dtype=self._torch_dtype)
            if self.name.endswith("bias"):
                whole.zero_()
        else:
            generator = torch.Generator(self._device).manual_seed(self._seed)
            whole = torch.empty(self.shape, device=self._device, dtype=self._torch_dtype)
            whole.normal_(0.0, 0.02, generator=generator)
        if dim is None:
            return whole
        return whole.narrow(dim, start, self.shape[dim] - start if length is None else length)


def _choose_format(
    module: LinearBase,
    pieces: Sequence[WeightPiece],
    formats: Sequence[WeightFormat],
    ctx: WeightContext,
) -> str:
    for weight_format in formats:
        method = weight_format.linear_method(module, pieces, ctx)
        if method is not None:
            module.method = method
            return weight_format.name
    return "dense"


def _by_parameter(model: nn.Module, weight_map: WeightMap) -> list[tuple[LoadableModule, str, list[WeightShardSpec]]]:
    """Entries of the map grouped by the parameter that they fill, in the map's order."""
    groups: dict[str, list[WeightShardSpec]] = {}
    for entry in weight_map:
        groups.setdefault(entry.param, []).append(entry)
    result = []
    for param, specs in groups.items():
        path, _, leaf = param.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, LoadableModule):
            raise WeightError(
                f"the weight map fills {param}, but {path} is a {type(module).__name__} that loads nothing"
            )
        result.append((module, leaf, specs))
    return result


def _group(
    model: nn.Module, weight_map: WeightMap, tensors: Mapping[str, TensorSource]
) -> list[tuple[LoadableModule, str, list[WeightPiece]]]:
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    result = []
    for module, leaf, specs in _by_parameter(model, weight_map):
        shapes = module.expected_shapes(leaf)
        pieces = []
        for spec in specs:
            source = next((tensors[n] for n in (spec.source, *spec.aliases) if n in tensors), None)
            if source is None:
                if not spec.optional:
                    missing.append(spec.source)
                continue
            used.add(source.name)
            expected = shapes[spec.shard_id]
            if tuple(source.shape) != expected:
                misshapen.append(f"{source.name} is {tuple(source.shape)} instead of {expected}")
            pieces.append(WeightPiece(spec, source))
        if pieces:
            result.append((module, leaf, pieces))
    extra = sorted(n for n in tensors if n not in used and not weight_map.is_ignored(n))
    problems = [
        f"{len(names)} {label}: {_listed(names)}"
        for label, names in (("missing", missing), ("misshapen", misshapen), ("unexpected", extra))
        if names
    ]
    if problems:
        raise WeightError("the checkpoint does not fit the model; tensors " + "; ".join(problems))
    return result


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _nbytes(source: TensorSource) -> int:
    return math.prod(source.shape) * 2


def _check_materialised(model: nn.Module) -> None:
    left = [name for name, p in model.named_parameters() if p.is_meta]
    if left:
        raise WeightError(f"the weight map leaves {len(left)} parameters unfilled: {_listed(left)}")
