"""What a checkpoint says about generation: end tokens and sampling defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arbi_core.model.hf_config import token_ids

if TYPE_CHECKING:
    from arbi_core.loader.base import TokenizerParts
    from arbi_core.spec import ModelSpec

__all__ = ["default_sampling", "end_token_ids"]

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def end_token_ids(
    spec: ModelSpec, generation_config: Mapping[str, Any], tokenizer: TokenizerParts | None
) -> frozenset[int]:
    """Ids that end a generation: those of the config, of the generation config, and the tokenizer's end token."""
    ids = set(spec.eos_token_ids) | set(token_ids(generation_config.get("eos_token_id")))
    if tokenizer is not None and tokenizer.eos_token is not None:
        end = tokenizer.backend.token_to_id(tokenizer.eos_token)
        if end is not None:
            ids.add(end)
    return frozenset(i for i in ids if 0 <= i < spec.dims.vocab_size)


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that requests get when they name none, as the checkpoint's author published them.

    ``do_sample`` false does not make requests greedy: published configs carry it by accident more often than by
    intent, and a client that wants greedy text says ``temperature: 0``.
    """
    return {k: generation_config[k] for k in SAMPLING_KEYS if isinstance(generation_config.get(k), (int, float))}
