"""Rotary position embedding (Su et al., 2021) and the context extensions that checkpoints declare.

``linear``: positions divided by a factor (Chen et al., 2023). ``llama3``: long wavelengths divided, a smooth ramp
between (Llama 3.1 model card). ``yarn``: NTK by parts with an attention factor (Peng et al., 2023).
"""

from __future__ import annotations

import math

import torch
from attrs import frozen

__all__ = ["RopeSpec", "RotaryEmbedding"]


@frozen
class RopeSpec:
    """Parameters of one table; equal specs share a table.

    Attributes:
        theta: base of the frequencies.
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        factor: context extension.
        original_max_position: context before extension (llama3, yarn).
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn.
        beta_slow: yarn.
        attention_factor: yarn; multiplies cos and sin. 0 means ``0.1 ln(factor) + 1``.
        truncate: yarn; round the correction range to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class RotaryEmbedding:
    """Tables of cosines and sines for NEOX-style rotation (dimension ``i`` pairs with ``i + d/2``).

    Args:
        dim: rotated dimensions of a head; even.
        max_positions: rows of the table; positions must stay below.
        spec: frequencies.
        device: where the table lives.
    """

    def __init__(self, dim: int, max_positions: int, spec: RopeSpec, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(dim, spec))
        cos, sin = angles.cos() * spec.magnitude, angles.sin() * spec.magnitude
        self.dim = dim
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and signed sin of ``(N,)`` positions, each ``(N, 1, dim)``; made once a step, used by all layers."""
        return (
            self._cos.index_select(0, positions).unsqueeze(1).to(dtype),
            self._sin.index_select(0, positions).unsqueeze(1).to(dtype),
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``(N, heads, d)``; dimensions past the table's width pass through unchanged."""
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)
    rotated = torch.addcmul(x[..., :dim] * cos, x[..., :dim].roll(dim // 2, -1), sin)
    return torch.cat((rotated, x[..., dim:]), dim=-1)


def inverse_frequencies(dim: int, spec: RopeSpec) -> torch.Tensor:
    """``(dim / 2,)`` float32 radians per position."""
    plain = 1.0 / (spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, dim, spec)
    return plain


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    ramp = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    keep = ramp.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(plain: torch.Tensor, dim: int, spec: RopeSpec) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * interpolated + plain * (1 - interpolated)
