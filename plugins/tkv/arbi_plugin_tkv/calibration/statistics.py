"""Moments of a layer's queries, keys and values, and the bases that follow from them."""

from __future__ import annotations

import torch

from arbi_plugin_tkv.codec.basis import Basis, fitted_basis

__all__ = ["LayerStatistics", "output_moment"]

SINK_TOKENS = 4
"""First tokens of a sequence left out of the moments: a model's sinks are unlike every other token."""


class LayerStatistics:
    """Sums over the tokens of one layer, in float64.

    Args:
        kv_heads: heads of keys and values.
        key_dim: width of a key.
        value_dim: width of a value.
    """

    def __init__(self, kv_heads: int, key_dim: int, value_dim: int) -> None:
        self.tokens = 0
        self.firsts = 0
        self._queries = 0
        self._key_sum = torch.zeros(kv_heads, key_dim, dtype=torch.float64)
        self._first_sum = torch.zeros(kv_heads, key_dim, dtype=torch.float64)
        self._keys = torch.zeros(kv_heads, key_dim, key_dim, dtype=torch.float64)
        self._readers = torch.zeros(kv_heads, key_dim, key_dim, dtype=torch.float64)
        self._values = torch.zeros(kv_heads, value_dim, value_dim, dtype=torch.float64)

    def emptied(self) -> LayerStatistics:
        """Statistics of the same widths that have counted nothing."""
        heads, key_dim = self._key_sum.shape
        return LayerStatistics(heads, key_dim, self._values.shape[-1])

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Count the tokens of a step.

        Args:
            q: ``(N, heads, key_dim)`` after rotary embedding.
            k: ``(N, kv_heads, key_dim)`` after rotary embedding.
            v: ``(N, kv_heads, value_dim)``.
            positions: ``(N,)`` of the tokens in their sequences.
        """
        self.firsts += int((positions == 0).sum())
        self._first_sum += k[positions == 0].double().cpu().sum(0)
        self.add_readers(q, positions)
        usual = positions >= SINK_TOKENS
        k, v = k[usual].double().cpu(), v[usual].double().cpu()
        self.tokens += k.shape[0]
        self._key_sum += k.sum(0)
        self._keys += torch.einsum("nhd,nhe->hde", k, k)
        self._values += torch.einsum("nhd,nhe->hde", v, v)

    def add_readers(self, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Count queries alone: those of a layer that reads this one's cache."""
        q = q[positions >= SINK_TOKENS].double().cpu()
        groups = q.reshape(q.shape[0], self._keys.shape[0], q.shape[1] // self._keys.shape[0], q.shape[2])
        self._queries += groups.shape[0] * groups.shape[2]
        self._readers += torch.einsum("nhgd,nhge->hde", groups, groups)

    def key_basis(self) -> Basis:
        """The basis of keys.

        Raises:
            ValueError: no tokens were counted.
        """
        self._check()
        mean = self._key_sum / self.tokens
        covariance = self._keys / self.tokens - torch.einsum("hd,he->hde", mean, mean)
        first = self._first_sum / self.firsts if self.firsts else None
        return fitted_basis(covariance, self._readers / self._queries, mean=mean, first=first)

    def value_basis(self, readers: torch.Tensor | None = None) -> Basis:
        """The basis of values; `readers` is what `output_moment` says of the output projection, None sees all alike.

        Raises:
            ValueError: no tokens were counted.
        """
        self._check()
        if readers is None:
            readers = torch.eye(self._values.shape[-1], dtype=torch.float64).expand_as(self._values)
        return fitted_basis(self._values / self.tokens, readers)

    def key_deviation(self) -> torch.Tensor:
        """Standard deviation of every channel of a key: ``(kv_heads, key_dim)`` float32."""
        self._check()
        square = self._keys.diagonal(dim1=-2, dim2=-1) / self.tokens
        return (square - (self._key_sum / self.tokens).square()).clamp_min(1e-12).sqrt().float()

    def _check(self) -> None:
        if not self.tokens:
            raise ValueError(f"no token stood behind the first {SINK_TOKENS} of its sequence: nothing was learned")


def output_moment(weight: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """How the output projection sees an error of a value: ``(kv_heads, value_dim, value_dim)`` float64.

    Args:
        weight: ``(hidden, heads * value_dim)`` of the output projection.
        heads: query heads.
        kv_heads: heads of values; a value is read by ``heads / kv_heads`` query heads.
    """
    blocks = weight.double().reshape(weight.shape[0], kv_heads, heads // kv_heads, -1)
    return torch.einsum("xhgd,xhge->hde", blocks, blocks)
