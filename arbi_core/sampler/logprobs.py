"""Log-probabilities of drawn tokens, over the raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from arbi_core.engine.messages import TokenLogprobs

__all__ = ["LogprobTensors", "score_tokens"]


@frozen(eq=False)
class LogprobTensors:
    """Scores of some rows, on the device or, after `map`, on the host.

    Attributes:
        logprobs: ``(R,)`` float32 of the drawn tokens.
        ranks: ``(R,)`` int64, 1 is the most likely token.
        top_ids: ``(R, C)`` int64 of the most likely tokens, best first.
        top_logprobs: ``(R, C)`` float32.
        counts: alternatives wanted per row.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    counts: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order of `entries`."""
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> LogprobTensors:
    """Score tokens; does not synchronise with the device.

    Args:
        logits: ``(R, V)`` float32, untouched by penalties and filters.
        tokens: ``(R,)`` drawn ids.
        counts: alternatives wanted per row.
    """
    log_z = logits.logsumexp(-1)
    chosen = logits.gather(-1, tokens.unsqueeze(-1))
    ranks = (logits > chosen).sum(-1) + 1
    values, index = logits.topk(min(max(counts), logits.shape[-1]), dim=-1)
    return LogprobTensors(chosen.squeeze(-1) - log_z, ranks, index, values - log_z.unsqueeze(-1), tuple(counts))


def entries(tokens: Sequence[int], tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row from `LogprobTensors.tensors` on the host."""
    own, ranks, ids, scores = (t.tolist() for t in tensors)
    return [
        TokenLogprobs(token, own[i], ranks[i], tuple(zip(ids[i][: counts[i]], scores[i][: counts[i]], strict=True)))
        for i, token in enumerate(tokens)
    ]
