"""From the engine's messages about one completion to what its reader sees: text, stop strings, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.engine.client import Finish, GenerationDelta
from arbi_core.engine.messages import FinishOut, FinishReason, TokenOut
from arbi_core.text.detokenizer import IncrementalDetokenizer
from arbi_core.text.stop import StopStrings

if TYPE_CHECKING:
    from arbi_core.sampler.params import SamplingParams
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["OutputAssembler"]


class OutputAssembler:
    """Assembles one completion.

    A stop string counts once a token after the first ``min_tokens`` completes it; it may have begun before.

    Args:
        tokenizer: None yields token ids without text.
        sampling: stop strings and how to decode.
        index: which of the request's completions.

    Attributes:
        stopped: a stop string ended the text. The owner cancels the request; tokens that still come are dropped, and
            `finish` turns whatever end the engine reports into the stop that the reader sees.
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
        used = 0
        last = len(out.token_ids) - 1
        for i, token in enumerate(out.token_ids):
            used = i + 1
            self._count += 1
            if self._detokenizer is not None and (stop_token_id is None or i != last):
                text.append(self._feed(self._detokenizer.push((token,))))
            if self._stop is not None:
                break
        return GenerationDelta(
            index=self._index,
            text="".join(text),
            token_ids=out.token_ids[:used],
            logprobs=out.logprobs[:used],
        )

    def finish(self, out: FinishOut) -> GenerationDelta:
        """Take the engine's end and give out the last text."""
        text = ""
        if not self.stopped and self._detokenizer is not None:
            text = self._feed(self._detokenizer.flush())
            if self._stop is None:
                text += self._stops.flush()
        finish = Finish(
            reason=FinishReason.STOP if self.stopped else out.reason,
            detail="" if self.stopped else out.detail,
            stop=self._stop if self.stopped else out.stop_token_id,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=self._count,
            cached_tokens=out.cached_tokens,
        )
        return GenerationDelta(index=self._index, text=text, finish=finish)

    def _feed(self, piece: str) -> str:
        """Text that may be given out after `piece`; notes a stop string that it completes."""
        if not piece:
            return ""
        if self._count <= self._min_tokens:
            return self._stops.feed_unheeded(piece)
        text, self._stop = self._stops.feed(piece)
        return text
