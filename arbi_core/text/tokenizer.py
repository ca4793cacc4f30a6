"""The tokenizer that the server and the offline API use, over the Rust ``tokenizers`` library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arbi_core.errors import RequestError

if TYPE_CHECKING:
    from arbi_core.loader.base import TokenizerParts

__all__ = ["Tokenizer"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes.

    Args:
        parts: what the checkpoint says.

    Attributes:
        vocab_size: largest id plus one, added tokens included.
        special_ids: ids that are no text (control tokens).
        chat_templates: Jinja sources by name.
        named_tokens: special tokens by template variable (``bos_token``, ``eos_token``, ...).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self._added_text = {i: t.content for i, t in added.items()}
        vocab = parts.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.chat_templates: Mapping[str, str] = parts.chat_templates
        named = {**parts.special, "bos_token": parts.bos_token, "eos_token": parts.eos_token}
        self.named_tokens = {k: v for k, v in named.items() if v is not None}
        self.bos_token_id = self._id(parts.bos_token)
        self.eos_token_id = self._id(parts.eos_token)
        self._byte_of = _byte_level_alphabet() if _is_byte_level(parts.backend) else None

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text. Other threads run meanwhile (the batch call releases the GIL)."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts."""
        try:
            encoded = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode") from None
        return [e.ids for e in encoded]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. Raises `RequestError` for ids out of range."""
        bad = next((i for i in ids if not 0 <= i < 2**32), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the vocabulary")
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; an id that the tokenizer does not know has none."""
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[c] for c in piece if c in self._byte_of)
        match = BYTE_TOKEN.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """Readable text of one token, as log-probabilities show it; broken UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _is_byte_level(backend: object) -> bool:
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and "ByteLevel" in repr(decoder)


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character that byte-level BPE writes (the printable bijection of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    extra = (b for b in range(256) if b not in set(printable))
    alphabet.update({chr(256 + n): b for n, b in enumerate(extra)})
    return alphabet
