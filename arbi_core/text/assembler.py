"""From the engine's messages about one completion to what its reader sees: text, stop strings, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.engine.client import Finish, GenerationDelta
from arbi_core.engine.messages import FinishOut, FinishReason, TokenLogprobs, TokenOut
from arbi_core.text.detokenizer import IncrementalDetokenizer
from arbi_core.text.stop import StopStrings

if TYPE_CHECKING:
    from arbi_core.sampler.params import SamplingParams
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["OutputAssembler"]


class OutputAssembler:
    """Assembles one completion.

    Args:
        tokenizer: None yields token ids without text.
        sampling: stop strings and how to decode.
        index: which of the request's completions.

    Attributes:
        stopped: a stop string ended the text. The owner cancels the request; tokens that still come are dropped, and
            `finish` turns the engine's end into the stop that the reader sees.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, *, index: int = 0) -> None:
        self._index = index
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._stop: str | None = None
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
            if tokenizer is not None and sampling.detokenize
            else None
        )

    @property
    def stopped(self) -> bool:
        """See the class."""
        return self._stop is not None

    def tokens(self, out: TokenOut, stop_token_id: int | None = None) -> GenerationDelta | None:
        """Take new tokens; None once a stop string has ended the text.

        Args:
            out: the engine's message.
            stop_token_id: the last token of `out` ends the completion and is no part of the text.
        """
        if self.stopped:
            return None
        text: list[str] = []
        last = len(out.token_ids) - 1
        for i, token in enumerate(out.token_ids):
            self._count += 1
            if stop_token_id is None or i != last:
                piece, self._stop = self._text(token)
                text.append(piece)
            if self._stop is not None:
                return self._delta("".join(text), out.token_ids[: i + 1], out.logprobs[: i + 1], None)
        return self._delta("".join(text), out.token_ids, out.logprobs, None)

    def finish(self, out: FinishOut) -> GenerationDelta:
        """Take the engine's end and give out the last text."""
        text = ""
        if self._stop is None:
            text, self._stop = self._flush()
        stopped = self._stop is not None and out.reason in {
            FinishReason.LENGTH,
            FinishReason.CANCELLED,
            FinishReason.STOP,
        }
        finish = Finish(
            reason=FinishReason.STOP if stopped else out.reason,
            detail=out.detail,
            stop=self._stop if stopped else out.stop_token_id,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=self._count,
            cached_tokens=out.cached_tokens,
        )
        return self._delta(text, (), (), finish)

    def _text(self, token: int) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        piece = self._detokenizer.push((token,))
        if self._count <= self._min_tokens:
            return piece, None
        return self._stops.feed(piece) if piece else ("", None)

    def _flush(self) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        text, stop = self._stops.feed(self._detokenizer.flush())
        return (text, stop) if stop is not None else (text + self._stops.flush(), None)

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: Finish | None,
    ) -> GenerationDelta:
        return GenerationDelta(index=self._index, text=text, token_ids=token_ids, logprobs=logprobs, finish=finish)
