"""Results of the offline API. Torch-free."""

from __future__ import annotations

from attrs import define, field

from arbi_core.engine.client import Finish, GenerationDelta
from arbi_core.engine.messages import TokenLogprobs

__all__ = ["CompletionOutput", "RequestOutput"]


@define
class CompletionOutput:
    """One completion.

    Attributes:
        index: which of the request's ``n``.
        text: generated text; empty under ``skip_tokenizer_init`` or ``detokenize=False``.
        token_ids: generated tokens, the one that stopped it included.
        logprobs: one entry per token, where the request asked for them.
        finish_reason: ``stop``, ``length``, ``cancelled``, ``timeout`` or ``error``; None while running.
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: what happened, for ``error``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, where the request asked for them."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    def add(self, delta: GenerationDelta) -> None:
        """Take in news of this completion."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if delta.finish is not None:
            self._end(delta.finish)

    def _end(self, finish: Finish) -> None:
        self.finish_reason = str(finish.reason)
        self.stop_reason = finish.stop
        self.error = finish.detail


@define
class RequestOutput:
    """All completions of one prompt.

    Attributes:
        request_id: unique in the engine's life.
        prompt: the text, where one was given.
        prompt_token_ids: its tokens.
        outputs: ``n`` completions.
        num_cached_tokens: prompt tokens served from the prefix cache, of the first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(o.finish_reason is not None for o in self.outputs)
