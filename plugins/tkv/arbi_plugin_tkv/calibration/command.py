"""``arbi calibrate MODEL --corpus FILE --out FILE``: learn a model's coordinates. Torch-free at import."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arbi_core.api import ArbiError, ConfigError
from arbi_plugin_tkv.calibration.capture import CAPTURE

__all__ = ["add_command", "calibrate"]

SEQUENCE = 1024
FIRSTS = 128
"""Prompts of one token each, for the key at position 0."""


def add_command(subparsers: Any) -> None:
    """Add ``arbi calibrate``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate", help="learn the coordinates in which a model's KV cache compresses best (from arbi-plugin-tkv)"
    )
    parser.add_argument("model", help="model directory, .gguf file, hub id, or 'demo'")
    parser.add_argument("--corpus", type=Path, required=True, help="text like that which the model will read, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--tokens", type=int, default=4 * SEQUENCE, help="tokens of the corpus that are read")
    parser.set_defaults(run=_run)


def calibrate(model: str, corpus: Path, out: Path, *, tokens: int = 4 * SEQUENCE, **engine: Any) -> int:
    """Run a corpus through a model and write the fitted bases of its layers.

    Args:
        model: as `arbi_core.LLM` takes it.
        corpus: UTF-8 text.
        out: file to write; see `arbi_plugin_tkv.calibration.bundle`.
        tokens: most tokens that are read.
        **engine: further arguments of `arbi_core.LLM`.

    Returns:
        Tokens that were counted.

    Raises:
        ConfigError: the corpus cannot be read or is too short, or the model has no cache that TKV compresses.
    """
    from arbi_core import LLM, SamplingParams
    from arbi_plugin_tkv.calibration.bundle import save_bundle

    try:
        text = corpus.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("corpus", f"{corpus} cannot be read: {exc}", "give a UTF-8 text file") from exc
    settings = {"max_num_batched_tokens": SEQUENCE, "enable_prefix_caching": False} | engine
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(model, kv_cache_dtype=CAPTURE.name, **settings) as llm:
        length = min(SEQUENCE, llm.info.max_model_len - 1)
        ids = llm.get_tokenizer().encode(text[: 8 * tokens])[:tokens]
        if len(ids) < length // 4:
            raise ConfigError("corpus", f"{corpus} has only {len(ids)} tokens", f"at least {length // 4}")
        CAPTURE.clear()
        prompts: list[Sequence[int]] = [ids[i : i + length] for i in range(0, len(ids), length)]
        prompts += [[token] for token in ids[:: max(1, len(ids) // FIRSTS)]]
        llm.generate([{"prompt_token_ids": list(p)} for p in prompts], once)
        if not CAPTURE.layers:
            raise ConfigError("model", f"{model} has no layer of keys and values in pages", "TKV has nothing to learn")
        bases = {index: (stats.key_basis(), stats.value_basis()) for index, stats in CAPTURE.layers.items()}
        about = {
            "model": llm.info.name,
            "architecture": llm.info.architecture,
            "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": len(ids),
        }
    save_bundle(out, bases, about)
    return len(ids)


def _run(args: argparse.Namespace) -> int:
    try:
        count = calibrate(args.model, args.corpus, args.out, tokens=args.tokens)
    except ArbiError as exc:
        sys.stderr.write(f"arbi calibrate: {exc}\n")
        return 1
    sys.stdout.write(
        f"learned from {count} tokens; use it with --kv-cache-dtype tkv --set plugins.tkv.calibration={args.out}\n"
    )
    return 0
