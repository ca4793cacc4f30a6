"""Log-probabilities in the two forms that OpenAI's endpoints have. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arbi_core.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from arbi_core.engine.messages import TokenLogprobs
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs"]


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The ``logprobs.content`` of the chat endpoint: per token its text, its exact bytes and the alternatives."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [{**one(e.token_id, e.logprob), "top_logprobs": [one(t, p) for t, p in e.top]} for e in entries]


class CompletionLogprobs:
    """The ``logprobs`` of the completions endpoint for one choice, block by block as a stream brings them.

    ``text_offset`` counts characters of the text: a token that is a part of a character has the offset of that
    character. A token whose bytes are no text of their own is written as ``bytes:\\xf0\\x9f``, as OpenAI writes it.

    Args:
        tokenizer: None names tokens by id and leaves all offsets at `offset`.
        skip_special_tokens: whether the text leaves control tokens out.
        offset: length of the text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        )

    def block(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The block for the next tokens."""
        return {
            "tokens": [self._name(e.token_id) for e in entries],
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{self._name(t): p for t, p in (e.top or ((e.token_id, e.logprob),))} for e in entries],
            "text_offset": [self._advance(e.token_id) for e in entries],
        }

    def _name(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _advance(self, token_id: int) -> int:
        at = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))
        return at
