"""The coordinates in which vectors are stored: default ones for any model, fitted ones for a calibrated model.

Vectors ``x`` are stored as ``y = (x - mean) @ encode`` and read as ``y @ decode + mean``. Attention never needs the
second product: ``q @ (y @ decode)`` is ``(q @ decode.T) @ y``, so queries are turned once, and outputs are turned
back once. Softmax does not change when one vector is taken from every key of a head, so means of keys cost nothing
either.

Fitted coordinates follow from one question: which noise do the readers of a vector notice? A query sees the error
``e`` of a key as ``(q @ e)**2``, on average ``e @ Q @ e`` with ``Q`` the second moment of queries; the output
projection ``W`` sees an error of a value through ``Q = W.T @ W``. A grid whose step follows the length of what it
stores makes noise of the size of ``trace(encode.T @ C @ encode)`` in every coordinate, ``C`` the covariance of
vectors, and readers see it times ``trace(decode @ Q @ decode.T)``. The product is least when ``encode @ encode.T`` is
the geometric mean of ``inverse(C)`` and ``Q``: then both covariances are the same, and each direction is stretched as
far as its readers care. The eigenvectors of that common covariance, strongest first, make the low half ``a`` and the
high half ``b``; a half is rotated in itself, so that its coordinates are alike and share one scale, and half ``a``
may have more bits.
"""

from __future__ import annotations

import torch
from attrs import frozen

from arbi_plugin_tkv.codec.rotation import rotation

__all__ = ["Basis", "default_key_basis", "default_value_basis", "fitted_basis", "frequency_order"]


@frozen(eq=False)
class Basis:
    """Coordinates of one side of one layer.

    Attributes:
        encode: ``(kv_heads, dim, padded)`` float32.
        decode: ``(kv_heads, padded, dim)`` float32, its inverse from the right: ``encode @ decode`` is the identity.
        mean: ``(kv_heads, dim)`` float32, taken from every vector before it is stored.
        first: ``(kv_heads, dim)`` float32, taken instead from the token at position 0, which models use as a sink.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    mean: torch.Tensor
    first: torch.Tensor

    @property
    def padded(self) -> int:
        """Coordinates stored."""
        return int(self.encode.shape[-1])

    def to(self, device: torch.device) -> Basis:
        """The same on a device."""
        return Basis(*(t.to(device).contiguous() for t in (self.encode, self.decode, self.mean, self.first)))


def frequency_order(dim: int) -> torch.Tensor:
    """Channels ordered from the lowest rotary frequency to the highest, ``(dim,)`` int64.

    Where rotary embedding pairs channel ``i`` with ``i + dim / 2``, low frequencies carry the constant part of keys
    and most of their energy. For other pairings it is an order like any other.
    """
    half = dim // 2
    low = torch.arange(half - 1, -1, -1)
    order = torch.stack((low, low + half), dim=1).flatten()
    return torch.cat((order, torch.arange(2 * half, dim)))


def default_key_basis(kv_heads: int, dim: int) -> Basis:
    """Keys of an unknown model: channels by frequency, each half rotated."""
    padded = -(-dim // 8) * 8
    order = torch.cat((frequency_order(dim), torch.arange(dim, padded)))
    matrix = torch.zeros(padded, padded, dtype=torch.float64)
    matrix[order] = _halves(padded)
    return _orthogonal(matrix, kv_heads, dim)


def default_value_basis(kv_heads: int, dim: int) -> Basis:
    """Values of an unknown model: rotated."""
    return _orthogonal(rotation(-(-dim // 8) * 8), kv_heads, dim)


def fitted_basis(
    covariance: torch.Tensor,
    readers: torch.Tensor,
    *,
    mean: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    ridge: float = 1e-2,
) -> Basis:
    """Coordinates in which the noise of a uniform grid disturbs readers least.

    Args:
        covariance: ``(kv_heads, dim, dim)`` of vectors (their second moment where `mean` is None).
        readers: ``(kv_heads, dim, dim)`` second moment of what multiplies them: queries, or the output projection.
        mean: ``(kv_heads, dim)`` taken from every vector.
        first: ``(kv_heads, dim)`` taken from the token at position 0; None takes `mean`.
        ridge: share of the mean diagonal added to both matrices, for directions that the sample hardly shows.

    Source: the geometric mean of positive matrices (Pusz and Woronowicz, 1975) as the minimiser of
    ``trace(P @ readers) * trace(inverse(P) @ covariance)``; equal error for unequal directions by more bits for the
    stronger half is reverse water-filling (Shannon, 1959).
    """
    heads, dim, _ = covariance.shape
    padded = -(-dim // 8) * 8
    c, q = (_padded(_ridged(m.double(), ridge), padded) for m in (covariance, readers))
    root, inverse = _power(q, 0.5), _power(q, -0.5)
    metric = inverse @ _power(root @ c @ root, 0.5) @ inverse
    forward, backward = _power(metric, -0.5), _power(metric, 0.5)
    _, vectors = torch.linalg.eigh(forward @ c @ forward)
    turn = vectors.flip(-1) @ _halves(padded).to(c.device)
    zero = torch.zeros(heads, dim, dtype=torch.float64, device=c.device)
    mean = zero if mean is None else mean.double()
    return Basis(
        (forward @ turn)[:, :dim].float().contiguous(),
        (turn.transpose(1, 2) @ backward)[:, :, :dim].float().contiguous(),
        mean.float(),
        (mean if first is None else first).float(),
    )


def _halves(padded: int) -> torch.Tensor:
    return torch.kron(torch.eye(2, dtype=torch.float64), rotation(padded // 2))


def _orthogonal(matrix: torch.Tensor, heads: int, dim: int) -> Basis:
    encode = matrix[:dim].float().expand(heads, -1, -1).contiguous()
    zero = torch.zeros(heads, dim)
    return Basis(encode, encode.transpose(1, 2).contiguous(), zero, zero)


def _ridged(matrix: torch.Tensor, ridge: float) -> torch.Tensor:
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12) * ridge
    return matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device) * level[:, None, None]


def _padded(matrix: torch.Tensor, padded: int) -> torch.Tensor:
    """Grow to `padded` with weak directions, which end in the tail of the high half."""
    dim = matrix.shape[-1]
    if dim == padded:
        return matrix
    grown = torch.zeros(matrix.shape[0], padded, padded, dtype=matrix.dtype, device=matrix.device)
    grown[:, :dim, :dim] = matrix
    level = matrix.diagonal(dim1=-2, dim2=-1).amin(-1) * 1e-6
    grown.diagonal(dim1=-2, dim2=-1)[:, dim:] = level.unsqueeze(-1)
    return grown


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """Power of symmetric positive matrices by their eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    values = torch.maximum(values, values.amax(-1, keepdim=True) * 1e-12)
    power: torch.Tensor = (vectors * values.pow(exponent).unsqueeze(-2)) @ vectors.transpose(-1, -2)
    return power
