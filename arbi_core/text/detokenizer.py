"""Incremental detokenization: text as tokens arrive, never half a character.

Where every piece stands for certain bytes (byte-level BPE, SentencePiece) the bytes go through an incremental UTF-8
decoder: exact, and a table look-up per token. Other decoders (WordPiece, suffix BPE) need to see a piece's neighbours;
there a window is decoded: the tokens since the text that was last given out, after those that came just before them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from arbi_core.text.pieces import PieceRules
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

REPLACEMENT = "\ufffd"
MAX_PENDING = 16
"""Tokens after which a window that still ends in a broken character is given out: no character is that long."""
KEPT = 256
"""Tokens that a window may keep before the old ones are dropped."""
EACH_BYTE = "arbi-replace-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD per bad byte, as SentencePiece's byte fallback writes them."""
    assert isinstance(error, UnicodeDecodeError)  # noqa: S101  # registered for decoding only
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)
_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns the generated tokens of one request into text.

    However the tokens are split over calls, the joined text is ``tokenizer.decode(all_ids)``. Ids that the vocabulary
    does not have (padding of the embedding) have no text.

    Args:
        tokenizer: knows the pieces.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream: _Stream = _Window(tokenizer) if tokenizer.rules is None else _Bytes(tokenizer, tokenizer.rules)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that they complete."""
        return self._stream.push([t for t in token_ids if t not in self._hidden])

    def flush(self) -> str:
        """The generation is over: return what was held back, broken characters as U+FFFD."""
        return self._stream.flush()


class _Stream(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """For pieces that stand for certain bytes."""

    def __init__(self, tokenizer: Tokenizer, rules: PieceRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._decoder = _utf8(EACH_BYTE if rules.byte_pieces else "replace")
        self._first = rules.bare_first
        self._leading = rules.leading

    def push(self, token_ids: Sequence[int]) -> str:
        if self._first:
            return self._text(self._with_first(token_ids))
        lookup = self._tokenizer.token_bytes
        return self._text(b"".join([lookup(t) for t in token_ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)  # the codec's own signature
        return self._without_leading(text)

    def _with_first(self, token_ids: Sequence[int]) -> bytes:
        known = [t for t in token_ids if self._tokenizer.piece(t) is not None]
        if not known:
            return b""
        self._first = False
        first = self._rules.first_to_bytes(self._tokenizer.piece(known[0]) or "")
        return first + b"".join([self._tokenizer.token_bytes(t) for t in known[1:]])

    def _text(self, data: bytes) -> str:
        return self._without_leading(self._decoder.decode(data))

    def _without_leading(self, text: str) -> str:
        if not self._leading or not text:
            return text
        rest = text
        while self._leading and rest.startswith(" "):
            rest, self._leading = rest[1:], self._leading - 1
        if rest:
            self._leading = 0
        return rest


class _Window:
    """For decoders that look at a piece's neighbours."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._emitted = 0
        self._prefix = ""

    def push(self, token_ids: Sequence[int]) -> str:
        known = [t for t in token_ids if self._tokenizer.piece(t) is not None]
        if not known:
            return ""
        self._ids.extend(known)
        text = self._decode(self._context)
        broken = self._tokenizer.may_break_characters and text.endswith(REPLACEMENT)
        if broken and len(self._ids) - self._emitted < MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context)) if self._emitted < len(self._ids) else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._context, self._emitted = self._emitted, len(self._ids)
        self._prefix = self._decode(self._context)
        if self._context > KEPT:
            del self._ids[: self._context]
            self._emitted -= self._context
            self._context = 0
        return new

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode_as_one(self._ids[start:])
