"""How one step's prefill tokens are divided among the prompts that compete for them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["share_prefill"]

FIRST_PART = 4
"""One in so many tokens is for the first in order; docs/simulations.md compares the choices."""


def share_prefill(
    remaining: Sequence[int], budget: int, chunk: int, *, batch: Sequence[bool] = (), batch_budget: int | None = None
) -> list[int]:
    """Divide a token budget: a quarter to the first in order, the rest to whoever has least left, the first among them.

    The quarter keeps a long prompt moving whatever arrives behind it: every prompt becomes the first in order some
    time, and from then on gets a quarter of every step. The rest lets a short prompt pass a long one: it waits for
    shorter ones only. Prompts of equal length are thus served one after another, which is the order with the least
    mean time to first token; a plain equal split would make all of them wait for the last.

    Args:
        remaining: tokens left of each prompt, in order of precedence.
        budget: tokens to give out.
        chunk: most tokens for one prompt.
        batch: which prompts are batch work; they come after all others. Default: none.
        batch_budget: most tokens for all batch prompts together; None does not limit them.

    Returns:
        Tokens for each prompt; their sum is at most `budget`.
    """
    given = [0] * len(remaining)
    if not remaining:
        return given
    bulk = list(batch) or [False] * len(remaining)
    left = budget if batch_budget is None else min(budget, batch_budget)

    def give(i: int, most: int) -> None:
        nonlocal budget, left
        n = max(0, min(remaining[i] - given[i], chunk - given[i], most, budget, left if bulk[i] else budget))
        given[i] += n
        budget -= n
        left -= n if bulk[i] else 0

    give(0, -(-budget // FIRST_PART))
    for i in sorted(range(len(remaining)), key=lambda i: (bulk[i], remaining[i] - given[i], i)):
        give(i, budget)
    return given
