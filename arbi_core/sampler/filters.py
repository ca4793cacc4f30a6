"""Top-k, top-p and min-p without sorting whole rows where it can be avoided.

Nucleus (Holtzman et al., 2020): the smallest set of most likely tokens whose mass reaches p, together with every token
exactly as likely as the last of them; computed on what top-k left. Min-p (Nguyen et al., 2024): relative to the most
likely token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arbi_core.sampler.host_copy import upload
from arbi_core.sampler.params import SamplingParams

__all__ = ["candidates", "min_p_mask"]

FIRST_CUT = 1024
"""Most likely tokens that are looked at first for a nucleus without top-k; grown until they hold its mass."""


def min_p_mask(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask ``(R, V)`` logits that are less likely than ``min_p`` ``(R,)`` times the row's best; 0 keeps everything."""
    floor = logits.amax(-1, keepdim=True) + min_p.log().unsqueeze(-1)
    return logits.masked_fill(logits < floor, -torch.inf)


def candidates(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter rows that use top-k or top-p.

    Args:
        logits: ``(R, V)`` float32, divided by temperature.
        params: one per row.

    Returns:
        Logits ``(R, C)``, best first, with everything that was filtered out at -inf, and their vocabulary indices.
    """
    vocab = logits.shape[1]
    device = logits.device
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    top_p = upload([p.top_p for p in params], torch.float32, device).unsqueeze(-1)
    min_p = upload([p.min_p for p in params], torch.float32, device)
    limited = upload([k if k else vocab for k in top_k], torch.int64, device).unsqueeze(-1)
    total = logits.logsumexp(-1, keepdim=True) if not all(top_k) else None
    cut = min(vocab, max((k or FIRST_CUT) for k in top_k))
    while True:
        values, index = logits.topk(cut, dim=-1)
        kept = values.masked_fill(torch.arange(cut, device=device) >= limited, -torch.inf)
        log_z = kept.logsumexp(-1, keepdim=True)
        if total is not None:
            log_z = torch.where(limited == vocab, total, log_z)
        mass = (kept - log_z).exp().cumsum(-1)
        short = (mass[:, -1:] < top_p) & (limited == vocab) & (top_p < 1)
        if cut == vocab or not bool(short.any()):
            break
        cut = min(vocab, 8 * cut)
    kept = _nucleus(kept, mass, top_p)
    return min_p_mask(kept, min_p), index


def _nucleus(values: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest prefix whose mass reaches `top_p`, and ties with its last value."""
    reached = (mass >= top_p).to(torch.int8)
    last = torch.where(reached.any(-1, keepdim=True), reached.argmax(-1, keepdim=True), values.shape[-1] - 1)
    boundary = values.gather(-1, last)
    return values.masked_fill((values < boundary) & (top_p < 1), -torch.inf)
