"""Bodies of the generation endpoints: OpenAI's fields, and vLLM's names for what OpenAI lacks."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import define

from arbi_core.engine.messages import Priority
from arbi_core.errors import RequestError
from arbi_core.sampler.params import SamplingParams
from arbi_core.server.schemas.base import described

__all__ = ["IGNORED", "REFUSED", "ChatRequest", "CompletionRequest", "sampling_params"]

IGNORED = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
"""Fields that name the caller or its bookkeeping and change no answer."""

REFUSED = {
    "audio": "this server makes no audio",
    "best_of": "use n",
    "function_call": "use tools",
    "functions": "use tools",
    "guided_json": "structured output is not served yet",
    "guided_regex": "structured output is not served yet",
    "modalities": "this server makes text only",
    "parallel_tool_calls": "tool calls are not served yet",
    "prediction": "predicted outputs are not served",
    "prompt_logprobs": "log-probabilities of the prompt are not served yet",
    "reasoning_effort": "pass chat_template_kwargs if the model's template has such a variable",
    "response_format": "structured output is not served yet",
    "suffix": "this server does not fill in the middle",
    "tool_choice": "tool calls are not served yet",
    "tools": "tool calls are not served yet",
    "verbosity": "models served here have no such control",
    "web_search_options": "this server does not search the web",
}
"""Fields that would change the answer and cannot be honoured."""

NUMBER = {"minimum": -2, "maximum": 2}


@define(kw_only=True)
class SamplingFields:
    """Fields that both endpoints share."""

    model: str = described("", "Name of the served model; empty means the one that is served.")
    stream: bool = described(False, "Send server-sent events as tokens arrive.")
    stream_options: dict[str, Any] | None = described(None, "{include_usage: true} adds a last chunk with the usage.")
    n: int = described(1, "Completions per prompt.", minimum=1, maximum=128)
    max_tokens: int | None = described(None, "Most tokens to generate.", minimum=1)
    min_tokens: int = described(0, "Stop tokens and strings are not honoured before this many tokens.", minimum=0)
    temperature: float | None = described(None, "0 is greedy.", minimum=0)
    top_p: float | None = described(None, "Nucleus mass.", exclusiveMinimum=0, maximum=1)
    top_k: int | None = described(None, "Keep the k most likely tokens; 0 keeps all.", minimum=-1)
    min_p: float | None = described(None, "Drop tokens less likely than this share of the best.", minimum=0, maximum=1)
    presence_penalty: float = described(0.0, "Once per token already generated.", **NUMBER)
    frequency_penalty: float = described(0.0, "Per occurrence of tokens already generated.", **NUMBER)
    repetition_penalty: float | None = described(None, "Over prompt and output.", exclusiveMinimum=0)
    logit_bias: dict[str, float] | None = described(None, "Added to the logits of these token ids.")
    seed: int | None = described(None, "The same seed and request give the same text.")
    stop: str | list[str] | None = described(None, "Strings that end the text.")
    stop_token_ids: list[int] | None = described(None, "Token ids that end the text.")
    ignore_eos: bool = described(False, "Generate past the model's end tokens.")
    include_stop_str_in_output: bool = described(False, "Keep the matched stop string.")
    skip_special_tokens: bool = described(True, "Leave special tokens out of the text.")
    logits_processors: list[str] | None = described(None, "Installed logits processors to apply.")
    priority: Literal["interactive", "batch"] | None = described(
        None, "batch runs when nothing interactive waits; the default, and the highest allowed, is the tenant's."
    )
    cache_enabled: bool = described(True, "Read and write the prefix cache.")
    job_id: str | None = described(
        None, "Keep progress under this name: sent again after a restart, the request goes on where it was."
    )
    timeout_s: float | None = described(None, "Seconds after which the request ends.", exclusiveMinimum=0)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        options = self.stream_options or {}
        unknown = sorted(set(options) - {"include_usage", "include_obfuscation"})
        if unknown:
            raise RequestError(f"unknown field 'stream_options.{unknown[0]}'", param="stream_options")
        if options and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return bool(options.get("include_usage", False))

    @property
    def scheduling(self) -> Priority | None:
        """Priority class, if the request names one."""
        return None if self.priority is None else Priority(self.priority)


@define(kw_only=True)
class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = attrs.field(metadata={"description": "The conversation."})
    max_completion_tokens: int | None = described(None, "Most tokens to generate; wins over max_tokens.", minimum=1)
    logprobs: bool = described(False, "Report log-probabilities.")
    top_logprobs: int | None = described(None, "Alternatives per token.", minimum=0, maximum=20)
    add_generation_prompt: bool = described(True, "End the prompt with the header of the assistant's turn.")
    chat_template: str | None = described(None, "Jinja source to use instead of the model's template.")
    chat_template_kwargs: dict[str, Any] | None = described(None, "Further variables for the template.")

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities wanted."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


@define(kw_only=True)
class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]] = attrs.field(
        metadata={"description": "A text, a list of texts, token ids, or a list of token id lists."}
    )
    echo: bool = described(False, "Repeat the prompt before the completion.")
    logprobs: int | None = described(None, "Alternatives per token.", minimum=0, maximum=20)

    @property
    def limit(self) -> int | None:
        """Most tokens to generate: 16 unless said otherwise, as OpenAI has it."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities wanted."""
        return self.logprobs


def sampling_params(request: ChatRequest | CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of a request; what it leaves out comes from the model's published defaults."""
    chosen = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if (value := getattr(request, name)) is not None
    }
    return SamplingParams(
        **{**defaults, **chosen},
        n=request.n,
        max_tokens=request.limit,
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias),
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=request.alternatives,
        logits_processors=request.logits_processors,
    )


def _logit_bias(raw: dict[str, float] | None) -> dict[int, float] | None:
    """JSON keys are strings; token ids are numbers."""
    if raw is None:
        return None
    result = {}
    for key, value in raw.items():
        if not key.isdecimal():
            raise RequestError(f"logit_bias has the key {key!r}; keys are token ids", param="logit_bias")
        result[int(key)] = value
    return result
