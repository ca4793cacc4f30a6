"""Incremental detokenization: text as tokens arrive, never half a character.

The window algorithm: decode the tokens since the last text that was given out, together with a few before them (so that
spacing rules see their neighbours), and emit what is new once it ends in a whole character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

REPLACEMENT = "\ufffd"
MAX_PENDING = 16
"""Tokens after which text that still ends in a broken character is given out as it is: no character is that long."""


class IncrementalDetokenizer:
    """Turns the generated tokens of one request into text.

    Args:
        tokenizer: decodes.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0
        self._emitted = 0
        self._prefix = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that they complete."""
        if self._skip:
            token_ids = [t for t in token_ids if t not in self._tokenizer.special_ids]
        if not token_ids:
            return ""
        self._ids.extend(token_ids)
        text = self._decode(self._context)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._emitted < MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The generation is over: return what was held back, broken characters as U+FFFD."""
        return self._emit(self._decode(self._context)) if self._emitted < len(self._ids) else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._context, self._emitted = self._emitted, len(self._ids)
        self._prefix = self._decode(self._context)
        if self._context > 256:
            del self._ids[: self._context]
            self._emitted -= self._context
            self._context = 0
        return new

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=False)
