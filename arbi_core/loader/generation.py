"""What a checkpoint says about generation: end tokens and sampling defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arbi_core.errors import CheckpointError, RequestError
from arbi_core.model.hf_config import token_ids
from arbi_core.sampler.params import SamplingParams

if TYPE_CHECKING:
    from arbi_core.loader.base import TokenizerParts
    from arbi_core.spec import ModelSpec

__all__ = ["default_sampling", "end_token_ids"]

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def end_token_ids(
    spec: ModelSpec, generation_config: Mapping[str, Any], tokenizer: TokenizerParts | None
) -> frozenset[int]:
    """Ids that end a generation: those of the config, of the generation config, and the tokenizer's end token.

    Published checkpoints name the end of a chat turn in any one of the three. Ids outside of the vocabulary (-1 stands
    for "none" in some configs) are left out.
    """
    ids = set(spec.eos_token_ids) | set(token_ids(generation_config.get("eos_token_id")))
    if tokenizer is not None and tokenizer.eos_token is not None:
        end = tokenizer.backend.token_to_id(tokenizer.eos_token)
        if end is not None:
            ids.add(end)
    return frozenset(i for i in ids if 0 <= i < spec.dims.vocab_size)


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that requests get when they name none, as the checkpoint's author published them.

    ``do_sample`` false does not make requests greedy, which is also how vLLM reads the file: published configs carry
    it by accident more often than by intent, and a client that wants greedy text says ``temperature: 0``.

    Raises:
        CheckpointError: a value that no request could have, by name.
    """
    chosen = {k: v for k in SAMPLING_KEYS if (v := generation_config.get(k)) is not None}
    if isinstance(chosen.get("top_k"), float) and chosen["top_k"].is_integer():
        chosen["top_k"] = int(chosen["top_k"])
    try:
        SamplingParams(**chosen)
    except RequestError as exc:
        raise CheckpointError(f"generation_config.json sets sampling defaults that cannot be served: {exc}") from exc
    return chosen
