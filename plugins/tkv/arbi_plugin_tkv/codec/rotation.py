"""Orthogonal matrices that spread a vector's energy evenly over its coordinates."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["cosine_matrix", "rotation", "walsh_hadamard"]


def walsh_hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix over ``sqrt(size)``: ``(size, size)`` float64, symmetric, orthogonal; row 0 is constant.

    Raises:
        ValueError: `size` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Walsh-Hadamard matrix of {size} rows does not exist: not a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(size)


def cosine_matrix(size: int) -> torch.Tensor:
    """The orthogonal DCT-II: ``(size, size)`` float64, one basis function a row; row 0 is constant."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * k.unsqueeze(1) * (k + 0.5)) * math.sqrt(2 / size)
    matrix[0] = 1 / math.sqrt(size)
    return matrix


@functools.lru_cache(maxsize=64)
def rotation(width: int, seed: int = 0) -> torch.Tensor:
    """Signed Walsh-Hadamard matrix for any width, by which row vectors are multiplied from the right.

    A width that is no power of two is its odd factor times a power of two: the Kronecker product of a cosine matrix
    and a Walsh-Hadamard matrix, so that nothing is padded. Input 0 keeps its sign and turns into the same number in
    every coordinate: whatever lies there is carried by the mean of a vector. The other inputs take fixed random signs.

    Args:
        width: numbers, at least 1.
        seed: of the signs. The codec uses 0; stored pages can be read with no other.

    Returns:
        ``(width, width)`` float64, orthogonal. Shared between callers: do not write to it.

    Source: random signs and a Hadamard transform before a scalar quantiser are QuIP#'s incoherence processing
    (Tseng et al., 2024) and the rotation of TurboQuant (Zandieh et al., 2025).
    """
    if width < 1:
        raise ValueError(f"a rotation of {width} numbers does not exist")
    power = width & -width
    matrix = torch.kron(cosine_matrix(width // power), walsh_hadamard(power))
    generator = torch.Generator().manual_seed(0x7C5 + 1000003 * seed + width)
    signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    signs[0] = 1
    return signs.unsqueeze(1) * matrix
