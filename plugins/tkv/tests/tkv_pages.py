"""Random steps over pages full of garbage, computed by the op and by the specification."""

import numpy as np
import torch
from attrs import define, field

from arbi_core.api import BackendContext, ForwardBatch, ParallelSpec
from arbi_plugin_tkv.codec import naive


@define
class Request:
    """Its pages in order, and what its tokens' keys and values were and are read back as."""

    pages: list[int]
    computed: int = 0
    raw: list[tuple[torch.Tensor, torch.Tensor]] = field(factory=list)


def make_batch(steps, page_size):
    """The batch in which each `(request, tokens)` computes that many further tokens; zero tokens are allowed."""
    lens = np.array([n for _, n in steps])
    cu = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    ends = np.array([r.computed + n for r, n in steps], dtype=np.int32)
    positions = [p for r, n in steps for p in range(r.computed, r.computed + n)]
    slots = [
        r.pages[p // page_size] * page_size + p % page_size for r, n in steps for p in range(r.computed, r.computed + n)
    ]
    table = np.zeros((len(steps), max(len(r.pages) for r, _ in steps) + 1), dtype=np.int32)
    for i, (r, _) in enumerate(steps):
        table[i, : len(r.pages)] = r.pages
    rows = np.zeros(len(steps), dtype=np.int64)
    return ForwardBatch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens_q=torch.tensor(cu),
        seq_lens=torch.tensor(ends),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=torch.tensor(table),
        state_rows=torch.tensor(rows),
        logit_rows=torch.tensor(cu[1:] - 1),
        cu_seqlens_q_host=cu,
        seq_lens_host=ends,
        block_table_host=table,
        state_rows_host=rows,
        page_size=page_size,
        num_tokens=int(cu[-1]),
        max_query_len=int(lens.max()),
        max_seq_len=int(ends.max()),
        is_decode=bool((lens == 1).all()),
    )


def context(page_size, options=None, parallel=None):
    return BackendContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        page_size=page_size,
        max_num_seqs=16,
        max_num_tokens=4096,
        max_model_len=4096,
        parallel=parallel or ParallelSpec(),
        options=options or {},
    )


class Layers:
    """Layers of one backend over one pool; pages start as random bytes, so that reading a strange slot shows."""

    def __init__(self, backend, layers, page_size, pages, *, sinks=None, options=None, seed=0):
        self.backend, self.layers, self.page_size, self.sinks = backend, layers, page_size, sinks
        self.random = torch.Generator().manual_seed(seed)
        ctx = context(page_size, options)
        self.builder = backend.metadata_builder(layers, ctx)
        self.ops = [backend.attn_op(la, ctx, sinks if la.sinks else None) for la in layers]
        self.states = [self._state(backend.storage(la, ctx), pages) for la in layers]
        for i, la in enumerate(layers):
            if la.kv_source_layer is not None:
                self.states[i] = self.states[la.kv_source_layer]

    def _state(self, storage, pages):
        state = {}
        for t in storage.pages:
            shape = (pages, *t.shape)
            if t.dtype == "uint8":
                state[t.name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.random)
            else:
                state[t.name] = torch.full(shape, torch.nan, dtype=getattr(torch, t.dtype))
        return state

    def draw(self, batch):
        la = self.layers[0]
        make = lambda heads, dim: torch.randn(batch.num_tokens, heads, dim, generator=self.random)  # noqa: E731
        return make(la.num_heads, la.head_dim), make(la.num_kv_heads, la.head_dim), make(la.num_kv_heads, la.value_dim)

    def step(self, steps, tensors=None):
        """Compute a step in all layers with the same q, k, v: ``(outputs per layer, q, k, v)``."""
        batch = make_batch(steps, self.page_size)
        q, k, v = tensors or self.draw(batch)
        plan = self.builder.build(batch)
        outs = []
        for la, op, state in zip(self.layers, self.ops, self.states, strict=True):
            out = torch.full((batch.num_tokens, la.num_heads, la.value_dim), torch.nan)
            mine = (k, v) if la.kv_source_layer is None else (None, None)
            assert op.forward(q, *mine, state, plan, out) is out
            outs.append(out)
        at = 0
        for request, n in steps:
            request.raw += [(k[at + i], v[at + i]) for i in range(n)]
            request.computed += n
            at += n
        return outs, q, k, v

    def stored(self, layer, request, count):
        """What the specification reads back of the first tokens of a request: ``(count, kv_heads, dim)`` each."""
        state = self.states[layer.index]
        if "kv" in state:
            slots = [request.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(count)]
            both = state["kv"].flatten(0, 1)[torch.tensor(slots, dtype=torch.int64)].double()
            width = layer.num_kv_heads * layer.head_dim
            shapes = (count, layer.num_kv_heads, layer.head_dim), (count, layer.num_kv_heads, layer.value_dim)
            return both[:, :width].reshape(shapes[0]), both[:, width:].reshape(shapes[1])
        store = self.ops[layer.index]._store
        layout = store._layout
        keys = torch.zeros(count, layer.num_kv_heads, layer.head_dim, dtype=torch.float64)
        values = torch.zeros(count, layer.num_kv_heads, layer.value_dim, dtype=torch.float64)
        for p in range(count):
            for h in range(layer.num_kv_heads):
                block = bytes(state["tkv"][request.pages[p // self.page_size], h].tolist())
                key, value = naive.read_page(block, layout, p % self.page_size)
                keys[p, h] = naive.turn_back(key, store._key, h, p)
                values[p, h] = naive.turn_back(value, store._value, h, p)
        return keys, values

    def expected(self, layer, request, count, q):
        """The specification's output of the last `count` tokens of a request, which were one chunk: ``(count, H, Dv)``."""
        before = request.computed - count
        keys, values = self.stored(layer, request, before)
        raw = request.raw[before:]
        keys = torch.cat((keys, torch.stack([k for k, _ in raw]).double()))
        values = torch.cat((values, torch.stack([v for _, v in raw]).double()))
        return torch.stack(
            [
                naive.attend(
                    q[i],
                    keys[: before + i + 1],
                    values[: before + i + 1],
                    scale=layer.softmax_scale,
                    window=layer.window,
                    soft_cap=layer.soft_cap,
                    sinks=self.sinks if layer.sinks else None,
                )
                for i in range(count)
            ]
        )
