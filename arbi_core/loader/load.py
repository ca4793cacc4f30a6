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
from arbi_core.loader.matching import Parameter, listed, match, targets
from arbi_core.loader.progress import NoProgress, Progress
from arbi_core.model.linear import DenseMethod, LinearBase
from arbi_core.model.loadable import set_parameter
from arbi_core.spec import WeightMap

__all__ = ["LoadReport", "load_dummy", "load_weights"]

LOAD_THREADS = 4
"""Parameters read and packed at once: more would only raise the peak of memory."""
DUMMY_DEVIATION = 0.02
DUMMY_DRAWS = 2**22 - 3
"""Most numbers drawn for one dummy tensor; a larger tensor repeats them. Prime, so no two rows of it line up."""


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
    """Read every tensor and put it where the map says, in the checkpoint's order.

    Args:
        model: built on the meta device.
        weight_map: its family's.
        tensors: the checkpoint's.
        ctx: device, dtype of activations and this rank's slice.
        weight_formats: asked in this order whether they hold a linear's weight; where none does, it is dense.
        progress: told the bytes of the file that have been dealt with.

    Raises:
        WeightError: tensors are missing, unexpected or misshapen, or no format can hold one; all of that is found
            before anything is read.
        CheckpointError: a file cannot be read.
    """
    progress = progress or NoProgress()
    parameters = match(model, weight_map, tensors)
    linears = _choose_formats(parameters, weight_formats, ctx)
    progress.start(sum(map(_parameter_bytes, parameters)), "loading weights")

    _fill(model, parameters, ctx.device, ctx.dtype, progress)
    return LoadReport(len({piece.source.name for p in parameters for piece in p.pieces}), linears)


def load_dummy(
    model: nn.Module,
    weight_map: WeightMap,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Fill the model with seeded random weights: norms one, biases zero, the rest normal with deviation 0.02.

    The same seed gives the same model whatever the number of ranks: a tensor is drawn whole from a generator seeded by
    its name, then cut. It depends on the kind of device and on the dtype, because their generators differ.
    """
    progress = progress or NoProgress()
    parameters = []
    for target in targets(model, weight_map):
        pieces = (
            WeightPiece(s, _DummySource(s.source, target.shapes[s.shard_id], seed, device, dtype)) for s in target.specs
        )
        parameters.append(Parameter(target, tuple(pieces)))
    progress.start(sum(map(_parameter_bytes, parameters)), "making random weights")
    _fill(model, parameters, device, dtype, progress)


class _DummySource:
    """A tensor drawn from (seed, name)."""

    encoding = "dense"

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, str(dtype).removeprefix("torch.")
        self._device, self._torch_dtype = device, dtype
        self._seed = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63

    def load(self, dim: int | None = None, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Draw it, and cut."""
        whole = torch.empty(self.shape, device=self._device, dtype=self._torch_dtype)
        if len(self.shape) == 1:
            whole.fill_(0.0 if self.name.endswith("bias") else 1.0)
        else:
            self._draw(whole.view(-1))
        if dim is None:
            return whole
        return whole.narrow(dim, start, self.shape[dim] - start if length is None else length)

    def _draw(self, flat: torch.Tensor) -> None:
        """Fill with normal numbers; repeating a block costs a tenth of drawing on a CPU."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        done = min(flat.numel(), DUMMY_DRAWS)
        flat[:done].normal_(0.0, DUMMY_DEVIATION, generator=generator)
        while done < flat.numel():
            step = min(done, flat.numel() - done)
            flat[done : done + step].copy_(flat[:step])
            done += step


def _fill(
    model: nn.Module, parameters: Sequence[Parameter], device: torch.device, dtype: torch.dtype, progress: Progress
) -> None:
    """Fill every parameter, a few at a time; the first failure cancels those that have not begun."""

    def fill(parameter: Parameter) -> None:
        target = parameter.target
        if parameter.pieces:
            target.module.load_pieces(target.leaf, parameter.pieces, device, dtype)
            return
        initial = target.module.get_parameter(target.leaf)
        if not initial.is_meta:  # optional and absent: it keeps the value that it was built with
            set_parameter(target.module, target.leaf, initial.detach().to(device, dtype))

    with ThreadPoolExecutor(max_workers=min(LOAD_THREADS, os.cpu_count() or 1)) as pool:
        for parameter, _ in zip(parameters, pool.map(fill, parameters), strict=True):
            progress.advance(_parameter_bytes(parameter))
    _check_materialised(model)


def _choose_formats(
    parameters: Sequence[Parameter], formats: Sequence[WeightFormat], ctx: WeightContext
) -> dict[str, int]:
    """Give every linear its method; returns how many linears each format holds."""
    linears: dict[str, int] = {}
    unreadable: list[str] = []
    for parameter in parameters:
        module = parameter.target.module
        if not isinstance(module, LinearBase) or parameter.target.leaf != "weight" or not parameter.pieces:
            continue
        name = _choose_format(module, parameter.pieces, formats, ctx)
        linears[name] = linears.get(name, 0) + 1
        if isinstance(module.method, DenseMethod):
            # Packed codes read as numbers would make a model that runs and talks nonsense.
            unreadable += [
                f"{p.source.name} ({p.source.dtype})" for p in parameter.pieces if not _is_floating(p.source.dtype)
            ]
    if unreadable:
        installed = ", ".join(f.name for f in formats) or "none"
        raise WeightError(
            f"{len(unreadable)} weights hold integers, and no weight format reads them (installed: {installed}): "
            f"{listed(unreadable)}"
        )
    return linears


def _choose_format(
    module: LinearBase, pieces: Sequence[WeightPiece], formats: Sequence[WeightFormat], ctx: WeightContext
) -> str:
    for weight_format in formats:
        method = weight_format.linear_method(module, pieces, ctx)
        if method is not None:
            module.method = method
            return weight_format.name
    return "dense"


def _is_floating(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.is_floating_point


def _parameter_bytes(parameter: Parameter) -> int:
    return sum(_stored_bytes(piece.source) for piece in parameter.pieces)


def _stored_bytes(source: TensorSource) -> int:
    """Bytes in the file. A packed source says so itself; a dense one is as large as its numbers."""
    stored: int | None = getattr(source, "nbytes", None)
    if stored is not None:
        return stored
    dtype: torch.dtype = getattr(torch, source.dtype)
    return math.prod(source.shape) * dtype.itemsize


def _check_materialised(model: nn.Module) -> None:
    left = [name for name, p in model.named_parameters() if p.is_meta]
    if left:
        raise WeightError(f"the weight map leaves {len(left)} parameters unfilled: {listed(left)}")
    left = [name for name, b in model.named_buffers() if b.is_meta]
    if left:
        raise WeightError(
            f"{len(left)} buffers were built on the meta device and hold nothing: {listed(left)}; build them on the "
            "CPU, or fill them in load_pieces"
        )
