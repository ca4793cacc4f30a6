"""Logits processors ``no-repeat-ngram-2``, ``-3`` and ``-4``: no n-gram occurs twice in prompt and answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from arbi_core.api import hookimpl

if TYPE_CHECKING:
    import torch

    from arbi_core.offers import LogitsProcessor
    from arbi_core.sampler.sampler import SamplerRow

__all__ = ["NoRepeatNgram"]

arbi_api_version = 1


@frozen
class NoRepeatNgram:
    """Bans every token that would complete an n-gram that has occurred (Paulus et al., 2017).

    Attributes:
        size: n.
    """

    size: int

    @property
    def name(self) -> str:
        """Name that requests use."""
        return f"no-repeat-ngram-{self.size}"

    def apply(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
        """See `arbi_core.offers.LogitsProcessor`."""
        for logit_row, row in zip(logits, rows, strict=True):
            banned = _completions(row.token_ids, self.size)
            if banned:
                logit_row[banned] = float("-inf")
        return logits


def _completions(tokens: list[int], size: int) -> list[int]:
    """Tokens that have followed the last ``size - 1`` tokens before."""
    stem = tokens[-(size - 1) :]
    width = size - 1
    if len(tokens) < width:
        return []
    return sorted({tokens[i + width] for i in range(len(tokens) - width) if tokens[i : i + width] == stem})


@hookimpl
def arbi_logits_processors() -> list[LogitsProcessor]:
    """Offer them."""
    return [NoRepeatNgram(2), NoRepeatNgram(3), NoRepeatNgram(4)]
