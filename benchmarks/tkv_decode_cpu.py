"""Time of one decode step of the demo model on the CPU by KV cache: the whole step, and the attention ops alone.

Usage: python benchmarks/tkv_decode_cpu.py [context] [backend,backend,...]

Every figure is the fastest of its repeats, which alternate between the backends, so that a busy machine hits all
alike. The pages are those of one request whose prompt was random numbers; the linears are held as ``arbi serve demo``
holds them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from arbi_core.backend.base import AttentionBackend, BackendContext
from arbi_core.backend.binding import LayerBinding
from arbi_core.config.tree import ModelConfig
from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.loader.base import WeightContext
from arbi_core.loader.load import load_weights
from arbi_core.loader.resolve import prepare
from arbi_core.model.base import BuildContext
from arbi_core.plugins import load_registry
from arbi_core.runner.batch import ForwardBatch
from arbi_core.spec import ParallelSpec
from arbi_plugin_tkv import plugin

PAGE = 16
REPEATS = 15


def step_batch(first: int, count: int) -> ForwardBatch:
    """A step of one row that computes `count` tokens after `first`; its pages are consecutive from 1 on."""
    table = np.arange(1, 1 + -(-(first + count) // PAGE), dtype=np.int32)[None]
    positions = torch.arange(first, first + count)
    return ForwardBatch(
        input_ids=torch.ones(count, dtype=torch.int64),
        positions=positions,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([first + count], dtype=torch.int32),
        slot_mapping=positions + PAGE,
        block_table=torch.from_numpy(table),
        state_rows=torch.zeros(1, dtype=torch.int64),
        logit_rows=torch.tensor([count - 1]),
        cu_seqlens_q_host=np.array([0, count], dtype=np.int32),
        seq_lens_host=np.array([first + count], dtype=np.int32),
        block_table_host=table,
        state_rows_host=np.zeros(1, dtype=np.int64),
        page_size=PAGE,
        num_tokens=count,
        max_query_len=count,
        max_seq_len=first + count,
        is_decode=count == 1,
    )


def filled(
    model: torch.nn.Module, backend: AttentionBackend, ctx: BackendContext, layers: tuple, context: int
) -> LayerBinding:
    """The model's layers over one request's pages."""
    binding = LayerBinding(layers, model, {layers[0].state_kind: backend}, ctx)  # type: ignore[arg-type]
    binding.allocate(context // PAGE + 3, 2)
    heads = layers[0]
    random = torch.Generator().manual_seed(0)
    binding.begin_step(step_batch(0, context))
    for call in binding.calls:
        k = torch.randn(context, heads.num_kv_heads, heads.head_dim, generator=random)
        q = torch.zeros(context, heads.num_heads, heads.head_dim)
        call(q, k, torch.randn(k.shape, generator=random))
    return binding


def fastest(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    """Print one line per backend."""
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    names = (
        sys.argv[2].split(",") if len(sys.argv) > 2 else ["reference", "tkv-bypass", "tkv-k4v4", "tkv-k3v3", "tkv-k8v8"]
    )
    registry = load_registry()
    offered = dict(registry.attention_backends) | {f"paged_kv:{b.name}": b for b in plugin.arbi_attention_backends()}
    loaded = prepare(ModelConfig(), registry)
    group = SingleProcessGroup()
    with torch.device("meta"):
        model = loaded.family.build(loaded.spec, BuildContext(torch.float32, group, 8192))
    weights = WeightContext(torch.device("cpu"), torch.float32, group.spec, {})
    tensors, formats = loaded.checkpoint.tensors(), registry.weight_formats
    load_weights(model, loaded.family.weight_map(loaded.spec), tensors, ctx=weights, weight_formats=formats)
    ctx = BackendContext(torch.device("cpu"), torch.float32, PAGE, 16, 4096, 8192, ParallelSpec())
    layers = loaded.spec.layers
    bindings = {name: filled(model, offered[f"paged_kv:{name}"], ctx, layers, context) for name in names}
    batch = step_batch(context, 1)
    la = layers[0]
    q, k = torch.randn(1, la.num_heads, la.head_dim), torch.randn(1, la.num_kv_heads, la.head_dim)
    whole: dict[str, list[float]] = {name: [] for name in names}
    ops: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(REPEATS):
        for name, binding in bindings.items():
            binding.begin_step(batch)
            whole[name].append(fastest(lambda: model.compute_logits(model.forward(batch, binding.calls))))  # noqa: B023
            ops[name].append(fastest(lambda: [call(q, k, k) for call in binding.calls]))  # noqa: B023
    base = min(whole[names[0]])
    print(f"context {context}, {torch.get_num_threads()} threads, pages of {PAGE}; fastest of {REPEATS}")
    for name, binding in bindings.items():
        step, attention = min(whole[name]), min(ops[name])
        print(
            f"{name:<12} step {step * 1e3:7.2f} ms ({step / base:4.2f} x), attention {attention * 1e3:7.2f} ms, "
            f"{binding.page_bytes / PAGE:7.0f} bytes a token"
        )


if __name__ == "__main__":
    main()
