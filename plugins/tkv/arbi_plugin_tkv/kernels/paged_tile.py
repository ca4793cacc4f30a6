"""What the paged kernels do with one tile of keys and values: find it, load it, fold it into a running softmax.

Products run on tensor cores in the pages' own 16 bits with float32 sums; the softmax is in powers of two, so that the
scale, ``log2 e`` and the subtraction of the running maximum are one fused operation a score.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

__all__ = ["LOG2E", "NO_WINDOW", "factors", "fold", "load_pages", "load_vectors"]

LOG2E = math.log2(math.e)
NO_WINDOW = 1 << 30
"""A window that hides nothing."""


def factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What products are multiplied by before the cap and after it.

    The cap is ``cap * tanh(scale * x / cap)``, and ``tanh(y) = 1 - 2 / (2 ** (2 y log2 e) + 1)``.
    """
    if scale <= 0:
        raise ValueError(f"softmax scale {scale} must be positive")
    if soft_cap is None:
        return 1.0, scale * LOG2E
    return 2 * LOG2E * scale / soft_cap, soft_cap * LOG2E


@triton.jit
def load_pages(table, first, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page ids of a tile of tokens from `first` on: one where a page holds the tile, else one per token.

    The null page stands for tokens at or after `end`.
    Loops load them a tile ahead: a load that waits for a load of the same turn would leave the pipeline a stage short.
    """
    if PAGE % TILE == 0:
        page = tl.load(table + first // PAGE, mask=first < end, other=0)
    else:
        token = first + tl.arange(0, TILE)
        page = tl.load(table + token // PAGE, mask=token < end, other=0)
    return page


@triton.jit
def load_vectors(
    head_pages, page, token, ok, page_stride, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """``(tokens, DP)`` vectors of one head; zeros for tokens that are not `ok`, whatever their slots hold."""
    channel = tl.arange(0, DP)
    at = head_pages + (page.to(tl.int64) * page_stride + token % PAGE * D)[:, None] + channel[None, :]
    if MASKED:
        if D == DP:
            numbers = tl.load(at, mask=ok[:, None], other=0.0)
        else:
            numbers = tl.load(at, mask=ok[:, None] & (channel < D)[None, :], other=0.0)
    elif D == DP:
        numbers = tl.load(at)
    else:
        numbers = tl.load(at, mask=(channel < D)[None, :], other=0.0)
    return numbers


@triton.jit
def fold(query, key, value, seen, total, top, out, before, after, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Fold a tile into the sums of weights, the greatest logits and the weighted sums, all of the query's rows."""
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    if CAP:
        scores = 1 - 2 / (tl.exp2(scores * before) + 1)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    top_now = tl.maximum(top, tl.max(scores, 1) * after)
    base = top_now
    if MASKED:
        # A row that has seen nothing yet has no maximum to subtract.
        base = tl.where(top_now == -float("inf"), 0.0, top_now)
    weights = tl.exp2(scores * after - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    out = tl.dot(weights.to(query.dtype), value.to(query.dtype), out * fade[:, None], input_precision="ieee")
    return total, top_now, out
