"""Reads rotary parameters in the old (``rope_theta``, ``rope_scaling``) and new (``rope_parameters``) spelling.

Torch-free; `RopeSpec` is imported when a config is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arbi_core.errors import UnsupportedModelError
from arbi_core.model.hf_config import HFConfig

if TYPE_CHECKING:
    from arbi_core.model.rope import RopeSpec

__all__ = ["parse_rope"]

KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
WHERE = "config.json: rope parameters"


def parse_rope(c: HFConfig, raw: Mapping[str, Any], max_positions: int, default_theta: float) -> RopeSpec:
    """Read the rotary parameters of a config whose layers all rotate alike.

    Args:
        c: the reader of `raw`; the rotary keys are marked as known.
        raw: the config.
        max_positions: ``max_position_embeddings``, where the context before extension is not given.
        default_theta: base where none is given.

    Raises:
        UnsupportedModelError: a kind, key or value that cannot be served exactly.
    """
    from arbi_core.model.rope import RopeSpec

    theta = c.positive("rope_theta", float, default_theta)
    c.skip("rope_scaling", "rope_parameters")
    scaling = _table(raw)
    if scaling is None:
        return RopeSpec(theta=theta)
    r = HFConfig(scaling, WHERE)
    kind = r.choose("rope_type" if "rope_type" in scaling else "type", KINDS, "default")
    r.skip("type", "rope_type")
    theta = r.positive("rope_theta", float, theta)
    r.choose("partial_rotary_factor", {1.0: 1.0}, 1.0)
    spec = _scaled(r, kind, theta, max_positions)
    r.finish()
    return spec


def _table(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old and new and _scaling(old) != _scaling(new):
        raise UnsupportedModelError(
            f"config.json: rope_scaling = {old!r} and rope_parameters = {new!r} contradict each other; keep one"
        )
    table = new or old
    if not table:
        return None
    if not isinstance(table, Mapping):
        raise UnsupportedModelError(f"{WHERE} must be a table, not {table!r}")
    return table


def _scaling(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "rope_theta"}


def _scaled(r: HFConfig, kind: str, theta: float, max_positions: int) -> RopeSpec:
    from arbi_core.model.rope import RopeSpec

    if kind == "default":
        r.choose("factor", {1.0: 1.0}, 1.0)
        r.skip("original_max_position_embeddings")
        return RopeSpec(theta=theta)
    if kind == "linear":
        r.skip("original_max_position_embeddings")
        return RopeSpec(theta=theta, kind=kind, factor=r.positive("factor", float))
    original = r.positive("original_max_position_embeddings", int, max_positions)
    return _llama3(r, theta, original) if kind == "llama3" else _yarn(r, theta, original, max_positions)


def _llama3(r: HFConfig, theta: float, original: int) -> RopeSpec:
    from arbi_core.model.rope import RopeSpec

    low, high = r.positive("low_freq_factor", float), r.positive("high_freq_factor", float)
    if low >= high:
        raise UnsupportedModelError(f"{WHERE}: low_freq_factor = {low} must be below high_freq_factor = {high}")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=r.positive("factor", float),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(r: HFConfig, theta: float, original: int, max_positions: int) -> RopeSpec:
    from arbi_core.model.rope import RopeSpec

    if theta <= 1:
        raise UnsupportedModelError(f"{WHERE}: rope_theta = {theta} must be above 1 for yarn")
    factor = r.positive("factor", float, max_positions / original)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=r.positive("beta_fast", float, 32.0),
        beta_slow=r.positive("beta_slow", float, 1.0),
        attention_factor=_attention_factor(r, factor),
        truncate=r.get("truncate", bool, True),
    )


def _attention_factor(r: HFConfig, factor: float) -> float:
    """Explicit factor, or the ratio that DeepSeek-style ``mscale`` pairs define; 0 leaves the paper's default."""
    explicit = r.positive("attention_factor", float, 0.0)
    mscale, all_dim = r.get("mscale", float, 0.0), r.get("mscale_all_dim", float, 0.0)
    if explicit or not (mscale and all_dim) or factor <= 1:
        return explicit
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
