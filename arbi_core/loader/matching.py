"""Lays a weight map over a built model and a checkpoint; all that does not fit is said before a byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen
from torch import nn

from arbi_core.errors import WeightError
from arbi_core.loader.base import TensorSource, WeightPiece
from arbi_core.model.loadable import LoadableModule
from arbi_core.spec import WeightMap, WeightShardSpec

__all__ = ["Parameter", "Target", "listed", "match", "targets"]

NAMED = 12
"""Most tensors that one error names one by one."""
QUANTISED = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_scale_2",
    ".weight_packed", ".input_scale", ".trellis", ".absmax",
)  # fmt: skip
"""How the side tensors of quantised checkpoints are called."""


@frozen
class Target:
    """One parameter of the model and the entries of the weight map that fill it.

    Attributes:
        module: holds the parameter.
        leaf: its name in the module.
        param: its full dotted name.
        specs: entries of the map, one per piece.
        shapes: checkpoint shape of each piece by shard id.
    """

    module: LoadableModule
    leaf: str
    param: str
    specs: tuple[WeightShardSpec, ...]
    shapes: Mapping[str | None, tuple[int, ...]]


@frozen
class Parameter:
    """A target and the checkpoint tensors found for it; no pieces where it is optional and absent."""

    target: Target
    pieces: tuple[WeightPiece, ...]


def targets(model: nn.Module, weight_map: WeightMap) -> list[Target]:
    """Group the map by parameter, in the map's order.

    Raises:
        WeightError: the map and the model do not belong together; the parameter and the piece are named.
    """
    groups: dict[str, list[WeightShardSpec]] = {}
    for entry in weight_map:
        groups.setdefault(entry.param, []).append(entry)
    return [_target(model, param, tuple(specs)) for param, specs in groups.items()]


def _target(model: nn.Module, param: str, specs: tuple[WeightShardSpec, ...]) -> Target:
    path, _, leaf = param.rpartition(".")
    try:
        module = model.get_submodule(path)
        if not isinstance(module, LoadableModule):
            kind = type(module).__name__
            raise WeightError(f"the weight map fills {param}, but {path or 'the model'} is a {kind} that loads nothing")
        shapes = module.expected_shapes(leaf)
    except AttributeError as exc:
        raise WeightError(f"the weight map fills {param}, which the model does not have: {exc}") from exc
    ids = [spec.shard_id for spec in specs]
    if len(set(ids)) != len(ids) or set(ids) != set(shapes):
        raise WeightError(f"the weight map fills {param} with the pieces {ids}, but it consists of {list(shapes)}")
    return Target(module, leaf, param, specs, shapes)


def match(model: nn.Module, weight_map: WeightMap, tensors: Mapping[str, TensorSource]) -> list[Parameter]:
    """Find the tensors of every parameter, in the order in which the checkpoint holds them.

    Raises:
        WeightError: tensors are missing, unexpected or misshapen; the message has all kinds, each with its count.
    """
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    result: list[Parameter] = []
    for target in targets(model, weight_map):
        pieces: list[WeightPiece] = []
        absent: list[WeightShardSpec] = []
        for spec in target.specs:
            source = next((tensors[n] for n in (spec.source, *spec.aliases) if n in tensors), None)
            if source is None:
                absent.append(spec)
                continue
            used.add(source.name)
            expected = target.shapes[spec.shard_id]
            if tuple(source.shape) != expected:
                misshapen.append(f"{source.name} is {tuple(source.shape)} instead of {expected}")
            pieces.append(WeightPiece(spec, source))
        # Half a merged parameter would be filled with whatever its memory held before.
        missing += [spec.source for spec in absent if pieces or not spec.optional]
        result.append(Parameter(target, tuple(pieces)))
    extra = sorted(n for n in tensors if n not in used and not weight_map.is_ignored(n))
    _refuse(missing, misshapen, extra)
    order = {name: i for i, name in enumerate(tensors)}
    return sorted(result, key=lambda p: min((order[piece.source.name] for piece in p.pieces), default=-1))


def _refuse(missing: list[str], misshapen: list[str], extra: list[str]) -> None:
    problems = [
        f"{len(names)} {label}: {listed(names)}"
        for label, names in (("missing", missing), ("misshapen", misshapen), ("unexpected", extra))
        if names
    ]
    if not problems:
        return
    hint = ""
    if any(name.endswith(QUANTISED) for name in extra):
        hint = "; it looks quantised in a form that no installed plugin reads"
    raise WeightError("the checkpoint does not fit the model; tensors " + "; ".join(problems) + hint)


def listed(names: Iterable[str]) -> str:
    """Names for people, the first dozen of them."""
    every: Sequence[str] = list(names)
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} more" if more > 0 else "")
