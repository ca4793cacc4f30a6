"""How one request wants its tokens drawn. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import field, frozen

from arbi_core.errors import RequestError

__all__ = ["SamplingParams"]


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value)


@frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters, with the names and ranges that OpenAI and vLLM use.

    Attributes:
        n: number of independent completions of the prompt.
        max_tokens: most tokens to generate; None means up to the context length.
        min_tokens: stop tokens and strings are not honoured before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p, in (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        presence_penalty: subtracted once from every token already generated, in [-2, 2].
        frequency_penalty: subtracted per occurrence of every token already generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        seed: makes the draw reproducible whatever else is in the batch; None draws a fresh seed per request.
        stop: strings that end the generation; they are not part of the text.
        stop_token_ids: ids that end the generation, beside the model's own.
        ignore_eos: generate past the model's end-of-sequence tokens.
        logprobs: report the log-probability of each token and of this many alternatives; None reports nothing.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False returns token ids only (`stop` must then be empty).
        logits_processors: names of installed logits processors, applied in this order.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logits_processors: tuple[str, ...] = field(default=(), converter=_strings)

    def __attrs_post_init__(self) -> None:
        _whole(self.n, "n", low=1, high=128)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", low=1)
        _whole(self.min_tokens, "min_tokens", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        _number(self.temperature, "temperature", 0.0, 100.0)
        _whole(self.top_k, "top_k", low=-1)
        _number(self.top_p, "top_p", 0.0, 1.0, open_low=True)
        _number(self.min_p, "min_p", 0.0, 1.0)
        _number(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _number(self.repetition_penalty, "repetition_penalty", 0.0, 100.0, open_low=True)
        for token, bias in (self.logit_bias or {}).items():
            _whole(token, "logit_bias", low=0)
            _number(bias, "logit_bias", -100.0, 100.0)
        if self.seed is not None:
            _whole(self.seed, "seed", low=-(2**63), high=2**64 - 1)
        if self.logprobs is not None:
            _whole(self.logprobs, "logprobs", low=0, high=128)
        for s in self.stop:
            if not isinstance(s, str) or not s:
                raise RequestError(f"stop holds {s!r}; every stop string must be a non-empty string", param="stop")
        for t in self.stop_token_ids:
            _whole(t, "stop_token_ids", low=0)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _whole(value: object, name: str, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {value!r}", param=name)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {span}, not {value}", param=name)


def _number(value: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {value!r}", param=name)
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must lie in {bracket}{low:g}, {high:g}], not {value}", param=name)
