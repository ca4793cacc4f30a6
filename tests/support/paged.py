"""Steps over pages built by hand, and attention written as loops in float64."""

import numpy as np
import torch
from attrs import define, field

from arbi_core.backend.base import BackendContext
from arbi_core.builtin.reference_attention import ReferenceBackend
from arbi_core.runner.batch import ForwardBatch
from arbi_core.spec import ParallelSpec


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


def context(page_size, dtype=torch.float32, device="cpu"):
    """Sizes of an engine on one rank."""
    return BackendContext(
        device=torch.device(device),
        dtype=dtype,
        page_size=page_size,
        max_num_seqs=16,
        max_num_tokens=4096,
        max_model_len=4096,
        parallel=ParallelSpec(),
    )


class Attention:
    """One layer over a pool whose unwritten slots are NaN, so that reading one shows."""

    def __init__(self, layer, page_size, pages, *, dtype=torch.float32, sinks=None, backend=None, device="cpu", seed=0):
        self.layer, self.sinks, self.dtype, self.page_size, self.device = layer, sinks, dtype, page_size, device
        backend = backend or ReferenceBackend()
        ctx = context(page_size, dtype, device)
        self.state = {
            t.name: torch.full((pages, *t.shape), torch.nan, dtype=getattr(torch, t.dtype), device=device)
            for t in backend.storage(layer, ctx).pages
        }
        self.builder = backend.metadata_builder([layer], ctx)
        self.op = backend.attn_op(layer, ctx, None if sinks is None else sinks.to(device))
        self.random = torch.Generator().manual_seed(seed)

    def step(self, steps):
        """Compute further tokens of some sequences; returns (op's output, loops' output)."""
        layer = self.layer
        batch = make_batch(steps, self.page_size, device=self.device)
        widths = (
            layer.num_heads * layer.head_dim,
            layer.num_kv_heads * layer.head_dim,
            layer.num_kv_heads * layer.value_dim,
        )
        fused = torch.randn(batch.num_tokens, sum(widths), generator=self.random).to(self.device, self.dtype)
        q, k, v = fused.split(widths, dim=1)
        q = q.unflatten(1, (layer.num_heads, -1))
        k, v = k.unflatten(1, (layer.num_kv_heads, -1)), v.unflatten(1, (layer.num_kv_heads, -1))
        out = torch.full(
            (batch.num_tokens, layer.num_heads, layer.value_dim), torch.nan, dtype=self.dtype, device=self.device
        )
        got = self.op.forward(q, k, v, self.state, self.builder.build(batch), out)
        assert got is out
        q, k, v, expected = q.cpu(), k.cpu(), v.cpu(), []
        for i, (sequence, n) in enumerate(steps):
            at = slice(int(batch.cu_seqlens_q_host[i]), int(batch.cu_seqlens_q_host[i + 1]))
            sequence.k += k[at].unbind()
            sequence.v += v[at].unbind()
            sequence.computed += n
            expected.append(naive_attention(layer, q[at], torch.stack(sequence.k), torch.stack(sequence.v), self.sinks))
        return got.cpu().double(), torch.cat(expected)
