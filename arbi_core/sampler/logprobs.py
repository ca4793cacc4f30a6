"""Log-probabilities of drawn tokens, over the raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arbi_core.engine.messages import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Score tokens.

    Args:
        logits: ``(R, V)`` float32, untouched by penalties and filters.
        tokens: ``(R,)`` drawn ids.
        counts: alternatives wanted per row.

    Returns:
        One entry per row; rank 1 is the most likely token.
    """
    log_z = logits.logsumexp(-1)
    chosen = logits.gather(-1, tokens.unsqueeze(-1))
    ranks = (logits > chosen).sum(-1) + 1
    most = min(max(counts), logits.shape[-1])
    values, index = logits.topk(most, dim=-1)
    scores = (values - log_z.unsqueeze(-1)).tolist()
    ids = index.tolist()
    own = (chosen.squeeze(-1) - log_z).tolist()
    return [
        TokenLogprobs(int(t), own[i], int(r), tuple(zip(ids[i][: counts[i]], scores[i][: counts[i]], strict=True)))
        for i, (t, r) in enumerate(zip(tokens.tolist(), ranks.tolist(), strict=True))
    ]
