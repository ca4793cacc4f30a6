"""The paged kernels in plain torch, for any device and dtype: what they are tested against."""

from __future__ import annotations

import torch

__all__ = ["attend", "read_row", "store"]


def store(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    """See `arbi_plugin_tkv.kernels.paged_store.store`."""
    size = k_pages.shape[2]
    page, offset = slots // size, slots % size
    k_pages.transpose(1, 2)[page, offset] = k.to(k_pages.dtype)
    v_pages.transpose(1, 2)[page, offset] = v.to(v_pages.dtype)


def read_row(pages: torch.Tensor, ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Positions `start` to `end` of a row whose pages are `ids`: ``(kv_heads, end - start, width)``."""
    size = pages.shape[2]
    first = start // size
    chosen = pages.index_select(0, ids[first : -(-end // size)])
    return chosen.transpose(0, 1).flatten(1, 2)[:, start - first * size : end - first * size]


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attend every token of every row to what is before it and to itself, out of the pages; reads the device.

    Args:
        q: ``(N, H, D)``.
        k_pages: ``(pages, kv_heads, page_size, D)``.
        v_pages: ``(pages, kv_heads, page_size, Dv)``.
        table: ``(B, W)`` int32 page ids.
        lengths: ``(B,)`` int32 context with the step's tokens.
        starts: ``(B + 1,)`` int32, where rows begin in the flat tokens.
        out: ``(N, H, Dv)``.
        scale: multiplies products of queries and keys.
        window: sliding window, the query's own token included.
        soft_cap: caps scaled products.
        sinks: ``(H,)`` extra logits.
        dtype: of the arithmetic.

    Returns:
        `out`.
    """
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        count = end - begin
        if not count:
            continue
        if not length:
            out[begin:end] = 0
            continue
        oldest = 0 if window is None else max(0, length - count - window + 1)
        keys = read_row(k_pages, table[row], oldest, length).to(dtype)
        values = read_row(v_pages, table[row], oldest, length).to(dtype)
        queries = q[begin:end].to(dtype).view(count, kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("nhgd,hsd->hgns", queries, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        token = torch.arange(oldest, length, device=q.device).unsqueeze(0)
        hidden = token > position
        if window is not None:
            hidden |= token <= position - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.to(dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1)[..., : length - oldest]
        out[begin:end] = torch.einsum("hgns,hsd->nhgd", weights, values).reshape(count, heads, -1).to(out.dtype)
    return out
