"""Split-K decode over compressed pages: one query token a row.

Computes, for every row and key head, softmax-weighted sums over the stored tokens of a share of the row's pages, in
turned coordinates; shares, the row's own raw token and the sinks are merged afterwards.
Bytes moved: ``slot_bytes`` per token and key head, once; queries and partial sums are small beside them.
Tile: one page of one head by 16 query columns (a group padded), so that codes are loaded once for the whole group.
Products are ``K q^T`` and ``V^T p^T``: the unpacked codes are the left operand of both, keys token-major and values
token-minor in their page, which is how they lie. Scales never touch codes: they multiply products of keys and weights
of values.
Measured fraction of the limit: not measured yet; proved in the interpreter only.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from arbi_plugin_tkv.codec.basis import Basis
from arbi_plugin_tkv.codec.layout import PageLayout
from arbi_plugin_tkv.codec.words import offset_step
from arbi_plugin_tkv.kernels.expand import load_codes, scale_a, scale_b, steps_a

__all__ = ["decode", "merge"]

NOTHING = -1e30
"""Stands for the logarithm of zero where a split has no tokens."""
COLUMNS = 16


@triton.jit
def _split(
    q, bias, slab, table, lengths, sums, tops, totals,
    table_stride, page_stride, scale, cap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, KEY_WORDS: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_WORDS: tl.constexpr,
    KN: tl.constexpr, KP: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, K_BYTES: tl.constexpr, K_STEP: tl.constexpr,
    VN: tl.constexpr, VP: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, V_STEP: tl.constexpr,
    CAP: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    start = tl.maximum(length - window + 1, 0)
    first_page, last_page = start // PAGE, tl.cdiv(length, PAGE)
    share = tl.cdiv(last_page - first_page, SPLITS)
    low = first_page + split * share
    high = tl.minimum(low + share, last_page)
    column, token = tl.arange(0, COLUMNS), tl.arange(0, PAGE)
    key_pair, value_pair = tl.arange(0, KP), tl.arange(0, VP)
    real = column < GROUP
    at = (row * HEADS + head) * GROUP + column
    key_mask = (key_pair < KN)[:, None] & real[None, :]
    query_a = tl.load(q + at[None, :] * (2 * KN) + key_pair[:, None], mask=key_mask, other=0.0)
    query_b = tl.load(q + at[None, :] * (2 * KN) + KN + key_pair[:, None], mask=key_mask, other=0.0)
    sum_a = tl.sum(query_a.to(tl.float32), 0)
    sum_b = tl.sum(query_b.to(tl.float32), 0) * ((2**KB - 1) / 2)
    mean = tl.load(bias + at * 2, mask=real, other=0.0)
    first = tl.load(bias + at * 2 + 1, mask=real, other=0.0)
    top = tl.full([COLUMNS], NOTHING, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    out_a = tl.zeros([VP, COLUMNS], tl.float32)
    out_b = tl.zeros([VP, COLUMNS], tl.float32)
    for page in range(low, high):
        block = slab + tl.load(table + row * table_stride + page).to(tl.int64) * page_stride + head * BLOCK
        position = page * PAGE + token
        seen = (position >= start) & (position < length)
        mask = seen[:, None] & (key_pair < KN)[None, :]
        a, b = load_codes(block, key_pair[None, :], token[:, None], mask, 1, K_BYTES, KN, KA, KB)
        word = tl.load((block + KEY_WORDS).to(tl.pointer_type(tl.int32)) + token, mask=seen, other=0)
        offset = steps_a(word) * K_STEP - (2**KA - 1) / 2
        dots_a = tl.dot(a.to(query_a.dtype), query_a, input_precision="ieee")
        dots_b = tl.dot(b.to(query_b.dtype), query_b, input_precision="ieee")
        scores = (dots_a + offset[:, None] * sum_a[None, :]) * scale_a(word)[:, None]
        scores += (dots_b - sum_b[None, :]) * scale_b(word)[:, None]
        scores = (scores + mean[None, :] + tl.where(position == 0, 1.0, 0.0)[:, None] * first[None, :]) * scale
        if CAP:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        scores = tl.where(seen[:, None], scores, NOTHING)
        higher = tl.maximum(top, tl.max(scores, 0))
        p = tl.where(seen[:, None], tl.exp(scores - higher[None, :]), 0.0)
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(p, 0)
        top = higher
        mask = (value_pair < VN)[:, None] & seen[None, :]
        a, b = load_codes(block + VALUE_CODES, value_pair[:, None], token[None, :], mask, PAGE, 1, VN, VA, VB)
        word = tl.load((block + VALUE_WORDS).to(tl.pointer_type(tl.int32)) + token, mask=seen, other=0)
        offset = steps_a(word) * V_STEP - (2**VA - 1) / 2
        weights_a, weights_b = p * scale_a(word)[:, None], p * scale_b(word)[:, None]
        out_a = out_a * fade[None, :] + tl.dot(a.to(query_a.dtype), weights_a.to(query_a.dtype), input_precision="ieee")
        out_b = out_b * fade[None, :] + tl.dot(b.to(query_a.dtype), weights_b.to(query_a.dtype), input_precision="ieee")
        out_a += tl.sum(weights_a * offset[:, None], 0)[None, :]
        out_b -= (tl.sum(weights_b, 0) * ((2**VB - 1) / 2))[None, :]
    to = ((row * HEADS + head) * SPLITS + split) * GROUP + column
    mask = (value_pair < VN)[:, None] & real[None, :]
    tl.store(sums + to[None, :] * (2 * VN) + value_pair[:, None], out_a, mask=mask)
    tl.store(sums + to[None, :] * (2 * VN) + VN + value_pair[:, None], out_b, mask=mask)
    tl.store(tops + to, top, mask=real)
    tl.store(totals + to, total, mask=real)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slab: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: PageLayout,
    key: Basis,
    value: Basis,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int = 16,
) -> torch.Tensor:
    """Attend one query token a row to the stored tokens before it, and to itself as it is.

    Args:
        q: ``(B, H, D)``.
        k: ``(B, Hkv, D)`` of the same tokens.
        v: ``(B, Hkv, Dv)`` of the same tokens.
        slab: ``(pages, Hkv, block_bytes)`` uint8.
        table: ``(B, W)`` int32 page ids.
        lengths: ``(B,)`` int32 stored tokens of each row; 0 for a row whose first token this is.
        layout: of a page, whose size is a power of two, at least 16 on a GPU.
        key: basis of keys.
        value: basis of values.
        scale: multiplies products of queries and keys.
        window: sliding window, the query's own token included.
        soft_cap: caps scaled products.
        sinks: ``(H,)`` extra logits.
        splits: shares of a row's pages; the grid is ``(B, Hkv, splits)``.

    Returns:
        ``(B, H, Dv)`` float32.
    """
    rows, heads = q.shape[:2]
    kv_heads, group = k.shape[1], heads // k.shape[1]
    queries = q.float().view(rows, kv_heads, group, -1)
    turned = torch.einsum("bhgd,hpd->bhgp", queries, key.decode)
    shifts = torch.stack((key.mean, key.first - key.mean), dim=-1)
    bias = torch.einsum("bhgd,hds->bhgs", queries, shifts).contiguous()
    if q.is_cuda:
        turned = turned.half()
    options = {"dtype": torch.float32, "device": q.device}
    sums = torch.empty(rows, kv_heads, splits, group, layout.value.padded, **options)  # type: ignore[call-overload]
    tops = torch.empty(rows, kv_heads, splits, group, **options)  # type: ignore[call-overload]
    totals = torch.empty_like(tops)
    ks, vs = layout.key, layout.value
    _split[(rows, kv_heads, splits)](
        turned.contiguous(), bias, slab, table, lengths, sums, tops, totals,
        table.stride(0), slab.stride(0), scale, soft_cap or 1.0, 1 << 30 if window is None else window,
        HEADS=kv_heads, GROUP=group, COLUMNS=max(COLUMNS, triton.next_power_of_2(group)), PAGE=layout.page_size,
        SPLITS=splits, BLOCK=layout.block_bytes, KEY_WORDS=layout.key_words, VALUE_CODES=layout.value_codes,
        VALUE_WORDS=layout.value_words, KN=ks.pairs, KP=max(16, triton.next_power_of_2(ks.pairs)), KA=ks.bits_a,
        KB=ks.bits_b, K_BYTES=ks.code_bytes, K_STEP=offset_step(ks.bits_a), VN=vs.pairs,
        VP=max(16, triton.next_power_of_2(vs.pairs)), VA=vs.bits_a, VB=vs.bits_b, V_STEP=offset_step(vs.bits_a),
        CAP=soft_cap is not None, NOTHING=NOTHING,
    )  # fmt: skip
    own = (queries * k.float().unsqueeze(2)).sum(-1) * scale
    if soft_cap is not None:
        own = soft_cap * torch.tanh(own / soft_cap)
    sink = None if sinks is None else sinks.float().view(kv_heads, group)
    stored, weight = merge(sums, tops, totals, own, sink)
    out = torch.einsum("bhgp,hpd->bhgd", stored, value.decode) + weight.unsqueeze(-1) * v.float().unsqueeze(2)
    return out.flatten(1, 2)


def merge(
    sums: torch.Tensor, tops: torch.Tensor, totals: torch.Tensor, own: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put shares, the row's own token and the sinks under one softmax.

    Args:
        sums: ``(B, Hkv, splits, group, padded)`` weighted sums relative to `tops`.
        tops: ``(B, Hkv, splits, group)`` greatest logits.
        totals: ``(B, Hkv, splits, group)`` sums of weights.
        own: ``(B, Hkv, group)`` logits of the rows' own tokens.
        sinks: ``(Hkv, group)`` or None.

    Returns:
        The stored tokens' part of the output, ``(B, Hkv, group, padded)``, and the own token's weight,
        ``(B, Hkv, group)``.
    """
    top = torch.maximum(tops.amax(2), own)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    share = torch.exp(tops - top.unsqueeze(2))
    weight = torch.exp(own - top)
    total = (share * totals).sum(2) + weight
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return (share.unsqueeze(-1) * sums).sum(2) / total.unsqueeze(-1), weight / total
