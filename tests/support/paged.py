"""Steps over pages built by hand, and attention written as loops in float64."""

import numpy as np
import torch
from attrs import define, field

from arbi_core.runner.batch import ForwardBatch


@define
class Sequence:
    """A request: its pages in order, and how many of its tokens have been computed."""

    pages: list[int]
    computed: int = 0
    k: list[torch.Tensor] = field(factory=list)
    v: list[torch.Tensor] = field(factory=list)


def make_batch(steps, page_size, *, device="cpu", ids=None, extra_width=2):
    """The batch in which each `(sequence, tokens)` of `steps` computes that many further tokens."""
    lens = np.array([n for _, n in steps])
    cu = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    ends = np.array([s.computed + n for s, n in steps], dtype=np.int32)
    positions = np.concatenate([np.arange(s.computed, s.computed + n) for s, n in steps])
    slots = np.concatenate(
        [
            [s.pages[p // page_size] * page_size + p % page_size for p in range(s.computed, s.computed + n)]
            for s, n in steps
        ]
    )
    table = np.zeros((len(steps), -(-int(ends.max()) // page_size) + extra_width), dtype=np.int32)
    for i, (s, _) in enumerate(steps):
        used = s.pages[: table.shape[1]]
        table[i, : len(used)] = used
    ids = np.zeros(cu[-1]) if ids is None else ids

    def tensor(values, dtype=torch.int64):
        return torch.as_tensor(values, dtype=dtype).to(device)

    return ForwardBatch(
        input_ids=tensor(ids),
        positions=tensor(positions),
        cu_seqlens_q=tensor(cu, torch.int32),
        seq_lens=tensor(ends, torch.int32),
        slot_mapping=tensor(slots),
        block_table=tensor(table, torch.int32),
        state_rows=tensor(np.zeros(len(steps))),
        logit_rows=tensor(cu[1:] - 1),
        cu_seqlens_q_host=cu,
        seq_lens_host=ends,
        block_table_host=table,
        state_rows_host=np.zeros(len(steps), dtype=np.int64),
        page_size=page_size,
        num_tokens=int(cu[-1]),
        max_query_len=int(lens.max()),
        max_seq_len=int(ends.max()),
        is_decode=bool((lens == 1).all()),
    )


def naive_attention(layer, q, keys, values, sinks=None):
    """Attention of ``(n, H, D)`` queries that end the context ``(S, Hkv, D)``: one query and one head at a time."""
    q, keys, values = q.double(), keys.double(), values.double()
    n, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = torch.zeros(n, heads, values.shape[-1], dtype=torch.float64)
    for i in range(n):
        last = keys.shape[0] - n + i
        first = 0 if layer.window is None else max(0, last - layer.window + 1)
        for h in range(heads):
            seen = keys[first : last + 1, h // group]
            logits = seen @ q[i, h] * layer.softmax_scale
            if layer.soft_cap is not None:
                logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
            if sinks is not None:
                logits = torch.cat((logits, sinks[h].double().view(1)))
            weights = logits.softmax(0)[: seen.shape[0]]
            out[i, h] = weights @ values[first : last + 1, h // group]
    return out
