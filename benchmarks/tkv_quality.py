"""What a compressed KV cache costs in quality: KL, top-1 agreement and perplexity of the demo model by codec.

Usage: python benchmarks/tkv_quality.py TEXT [--calibrate TEXT] [--only NAME,...] [--sequences 4] [--tokens 1024]
           [--chunk 0] [--start 300000] [--json FILE]

The model runs in float32 with its weights dequantised. Keys after rotary embedding and values of every layer are
replaced by what the codec gives back, for every token (``--chunk 0``: each token reads even itself through the codec)
or for all but the reader's own chunk of so many tokens, as the engine does. KL is in nats against the unquantised
model, averaged over all positions; bits are per number, scales and offsets included.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from tkv_candidates import Codec, candidates

from arbi_core.config.tree import ModelConfig
from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.loader.base import WeightContext
from arbi_core.loader.load import load_weights
from arbi_core.loader.resolve import prepare
from arbi_core.model.base import BuildContext
from arbi_core.plugins import load_registry
from arbi_core.runner.batch import ForwardBatch
from arbi_core.text.tokenizer import Tokenizer
from arbi_plugin_tkv.calibration.statistics import LayerStatistics

Tap = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
FIRST_TOKENS = 128
CALIBRATION_TOKENS = 1024


@frozen
class Quality:
    """One line of the table."""

    kl: float
    median: float
    p99: float
    top1: float
    perplexity: float


class Lab:
    """The demo model with attention written out, so that a codec can stand between keys and their readers."""

    def __init__(self) -> None:
        registry = load_registry()
        loaded = prepare(ModelConfig(), registry)
        group = SingleProcessGroup()
        with torch.device("meta"):
            self.model = loaded.family.build(loaded.spec, BuildContext(torch.float32, group, 8192))
        ctx = WeightContext(torch.device("cpu"), torch.float32, group.spec, {})
        load_weights(self.model, loaded.family.weight_map(loaded.spec), loaded.checkpoint.tensors(), ctx=ctx)
        self.model.eval()
        self.layers = loaded.spec.layers
        assert loaded.tokenizer is not None
        self.tokenizer = Tokenizer(loaded.tokenizer)

    def output_weight(self, layer: int) -> torch.Tensor:
        """``(hidden, heads * dim)`` of a layer's output projection."""
        return self.model.get_parameter(f"layers.{layer}.attn.output.weight").detach()

    def logits(
        self, ids: list[int], codec: Codec | None = None, chunk: int = 0, tap: Tap | None = None
    ) -> torch.Tensor:
        """``(N, vocab)`` of one sequence; no codec is full precision."""
        calls = [self._call(i, codec, chunk, tap) for i in range(len(self.layers))]
        hidden = self.model.forward(_batch(ids, torch.arange(len(ids))), calls)
        return self.model.compute_logits(hidden)

    def tap_firsts(self, ids: list[int], tap: Tap) -> None:
        """Show tokens that each stand at position 0 of a sequence of their own."""

        def make(layer: int) -> Callable[..., torch.Tensor]:
            def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                tap(layer, q, k, v)
                return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

            return call

        batch = _batch(ids, torch.zeros(len(ids), dtype=torch.int64))
        self.model.forward(batch, [make(i) for i in range(len(self.layers))])

    def _call(self, layer: int, codec: Codec | None, chunk: int, tap: Tap | None) -> Callable[..., torch.Tensor]:
        scale = self.layers[layer].softmax_scale

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if tap is not None:
                tap(layer, q, k, v)
            if codec is None:
                return attend(q, k, v, k, v, torch.zeros(1, 1, dtype=torch.bool), scale)
            stored_k, stored_v = codec.through(layer, k, v)
            return attend(q, stored_k, stored_v, k, v, raw_mask(len(q), chunk, codec), scale)

        return call


def raw_mask(count: int, chunk: int, codec: Codec) -> torch.Tensor:
    """``(count, count)`` or ``(1, 1)``: where a query reads a key as it was before the codec."""
    if not (chunk or codec.first_raw or codec.recent_raw):
        return torch.zeros(1, 1, dtype=torch.bool)
    at = torch.arange(count)
    mask = (at < codec.first_raw).expand(count, count)
    if codec.recent_raw:
        mask = mask | (at > at.unsqueeze(1) - codec.recent_raw)
    if chunk:
        mask = mask | (at // chunk == at.unsqueeze(1) // chunk)
    return mask


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_k: torch.Tensor,
    raw_v: torch.Tensor,
    raw: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention ``(N, H, D)`` over ``(N, Hkv, D)``, over the raw ones where `raw` says so."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    queries = q.view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (queries @ k.permute(1, 2, 0)).view(heads, n, n)
    mixed = raw.numel() > 1
    if mixed:
        scores = torch.where(raw, (queries @ raw_k.permute(1, 2, 0)).view(heads, n, n), scores)
    scores = scores.mul_(scale).masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    p = scores.softmax(-1).view(kv_heads, -1, n)
    if mixed:
        mask = raw.repeat(heads // kv_heads, 1)
        out = p.masked_fill(mask, 0) @ v.transpose(0, 1) + p.masked_fill(~mask, 0) @ raw_v.transpose(0, 1)
    else:
        out = p @ v.transpose(0, 1)
    return out.view(heads, n, -1).transpose(0, 1).contiguous()


def calibrate(lab: Lab, ids: list[int]) -> list[LayerStatistics]:
    """Moments of every layer over sequences of `CALIBRATION_TOKENS` and over single tokens at position 0."""
    stats = [LayerStatistics(la.num_kv_heads, la.head_dim, la.value_dim) for la in lab.layers]
    for at in range(0, len(ids), CALIBRATION_TOKENS):
        lab.logits(
            ids[at : at + CALIBRATION_TOKENS], tap=lambda i, q, k, v: stats[i].add(q, k, v, torch.arange(len(q)))
        )
    step = max(1, len(ids) // FIRST_TOKENS)
    lab.tap_firsts(ids[::step], lambda i, q, k, v: stats[i].add(q, k, v, torch.zeros(len(q), dtype=torch.int64)))
    return stats


def measure(lab: Lab, sequences: list[list[int]], references: list[torch.Tensor], codec: Codec, chunk: int) -> Quality:
    """Run all sequences through a codec."""
    kls, agree, losses = [], [], []
    for ids, reference in zip(sequences, references, strict=True):
        log_p = lab.logits(ids, codec, chunk).log_softmax(-1)
        kls.append((reference.exp() * (reference - log_p)).sum(-1))
        agree.append((log_p.argmax(-1) == reference.argmax(-1)).float())
        losses.append(_loss(log_p, ids))
    kl = torch.cat(kls)
    return Quality(
        kl.mean().item(),
        kl.median().item(),
        kl.quantile(0.99).item(),
        torch.cat(agree).mean().item(),
        math.exp(sum(losses) / len(losses)),
    )


def _loss(log_p: torch.Tensor, ids: list[int]) -> float:
    return -log_p[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean().item()


def _batch(ids: list[int], positions: torch.Tensor) -> ForwardBatch:
    n, none = len(ids), np.zeros((1, 1), dtype=np.int32)
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=positions,
        cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        slot_mapping=torch.arange(n),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        state_rows=torch.zeros(1, dtype=torch.int64),
        logit_rows=torch.arange(n),
        cu_seqlens_q_host=np.array([0, n]),
        seq_lens_host=np.array([n]),
        block_table_host=none,
        state_rows_host=none[0],
        page_size=16,
        num_tokens=n,
        max_query_len=n,
        max_seq_len=n,
        is_decode=False,
    )


def _ids(lab: Lab, path: Path, start: int, count: int) -> list[int]:
    text = path.read_text(encoding="utf-8", errors="replace")[start : start + 8 * count]
    ids = lab.tokenizer.encode(text)[:count]
    if len(ids) < count:
        raise SystemExit(f"{path} has {len(ids)} tokens from character {start} on; {count} are needed")
    return ids


@torch.inference_mode()
def main() -> None:
    """Print one line per codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--calibrate", type=Path, help="text for the fitted bases; none leaves fitted codecs out")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--calibration-start", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--start", type=int, default=300_000)
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lab = Lab()
    stats = None
    if args.calibrate is not None:
        began = time.perf_counter()
        stats = calibrate(lab, _ids(lab, args.calibrate, args.calibration_start, args.calibration_tokens))
        print(
            f"calibrated on {args.calibration_tokens} tokens of {args.calibrate.name} "
            f"in {time.perf_counter() - began:.0f} s"
        )
    whole = _ids(lab, args.text, args.start, args.sequences * args.tokens)
    sequences = [whole[i : i + args.tokens] for i in range(0, len(whole), args.tokens)]
    references = [lab.logits(ids).log_softmax(-1) for ids in sequences]
    base = math.exp(sum(_loss(r, s) for r, s in zip(references, sequences, strict=True)) / len(sequences))
    print(
        f"{args.sequences} x {args.tokens} tokens of {args.text.name}, own chunk raw: {args.chunk}, "
        f"perplexity {base:.3f}"
    )
    print("codec                                    bits  KL mean   median      p99   top-1  perplexity", flush=True)
    results = {}
    for codec in candidates(lab.layers, stats, [lab.output_weight(i) for i in range(len(lab.layers))]):
        if args.only and not any(part in codec.name for part in args.only.split(",")):
            continue
        q = measure(lab, sequences, references, codec, args.chunk)
        print(
            f"{codec.name:<38} {codec.bits:>6.2f} {q.kl:>8.4f} {q.median:>8.4f} {q.p99:>8.3f} {q.top1:>7.1%} "
            f"{q.perplexity:>11.3f}",
            flush=True,
        )
        results[codec.name] = {"bits": codec.bits, "kl": q.kl, "top1": q.top1, "perplexity": q.perplexity}
    if args.json is not None:
        args.json.write_text(json.dumps({"perplexity": base, "chunk": args.chunk, "codecs": results}, indent=1))


if __name__ == "__main__":
    main()
