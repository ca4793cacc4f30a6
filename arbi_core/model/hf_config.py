"""Reads a Hugging Face config key by key, with types, and refuses what nobody read. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from arbi_core.errors import UnsupportedModelError

__all__ = ["MEANINGLESS_KEYS", "HFConfig", "token_ids"]

T = TypeVar("T")
N = TypeVar("N", int, float)

MEANINGLESS_KEYS = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "hidden_dropout", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "sep_token_id",
    "task_specific_params", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "vocab_size_padded",
})  # fmt: skip
"""Keys that do not change what inference computes (or that the core reads itself: dtype, token ids)."""


class HFConfig:
    """A config being read.

    Args:
        raw: the ``config.json`` dict.

    Every `get` marks its key as known; `finish` raises for keys that are neither known nor meaningless.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self._raw = raw
        self._where = where
        self._seen: set[str] = set()

    def get(self, key: str, kind: type[T], *default: T) -> T:
        """Read a key; a missing or null one takes the default or, without one, is refused by name."""
        value = self.find(key, kind)
        if value is not None:
            return value
        if default:
            return default[0]
        raise UnsupportedModelError(f"{self._where}: {key} is missing")

    def find(self, key: str, kind: type[T]) -> T | None:
        """Read a key that may be missing or null."""
        self._seen.add(key)
        value = self._raw.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UnsupportedModelError(f"{self._where}: {key} must be {kind.__name__}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedModelError(f"{self._where}: {key} must be a finite number, not {value!r}")
        return value

    def positive(self, key: str, kind: type[N], *default: N) -> N:
        """Read a number as `get` does; a written one that is not above zero is refused by name."""
        value = self.get(key, kind, *default)
        if value <= 0 and self._raw.get(key) is not None:
            raise UnsupportedModelError(f"{self._where}: {key} must be positive, not {value!r}")
        return value

    def choose(self, key: str, allowed: Mapping[Any, T], *default: T) -> T:
        """Read a key whose value must be one of `allowed`; anything else is refused by name and value."""
        self._seen.add(key)
        value = self._raw.get(key)
        if value is None and default:
            return default[0]
        if isinstance(value, (list, dict)) or value not in allowed:
            options = ", ".join(repr(k) for k in allowed)
            raise UnsupportedModelError(f"{self._where}: {key} = {value!r} is not supported (supported: {options})")
        return allowed[value]

    def skip(self, *keys: str) -> None:
        """Mark keys as known without reading them."""
        self._seen.update(keys)

    def finish(self) -> None:
        """Raise `UnsupportedModelError` naming every key that was not read and may carry meaning."""
        unknown = sorted(
            key
            for key, value in self._raw.items()
            if key not in self._seen and key not in MEANINGLESS_KEYS and value is not None
        )
        if unknown:
            listed = ", ".join(f"{k} = {self._raw[k]!r}" for k in unknown)
            raise UnsupportedModelError(
                f"{self._where} has settings that this model family does not know, so it could not be served exactly: "
                f"{listed}"
            )


def token_ids(value: Any, key: str = "eos_token_id") -> tuple[int, ...]:
    """Normalise a token id setting: a number, a list of numbers or nothing.

    Raises:
        UnsupportedModelError: anything else, named by `key`.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise UnsupportedModelError(f"{key} must be a token id or a list of them, not {value!r}")
    return tuple(ids)
