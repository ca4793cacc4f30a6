"""The tokenizer that the server and the offline API use, over the Rust ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arbi_core.errors import RequestError
from arbi_core.text.detokenizer import IncrementalDetokenizer
from arbi_core.text.pieces import BYTE_PIECE, PieceRules, byte_level_alphabet, decoder_steps, piece_rules

if TYPE_CHECKING:
    from arbi_core.loader.base import TokenizerParts

__all__ = ["Tokenizer"]


class Tokenizer:
    """Encodes and decodes. All methods may be called from several threads.

    A prompt is never cut or padded here: truncation and padding that a ``tokenizer.json`` carries from training are
    switched off.

    Args:
        parts: what the checkpoint says. Its backend belongs to this object from now on.

    Attributes:
        vocab_size: largest id plus one, added tokens included.
        special_ids: ids that are no text (control tokens).
        chat_templates: Jinja sources by name.
        named_tokens: special tokens by template variable (``bos_token``, ``eos_token``, ...).
        bos_token_id: id of the begin token, if the vocabulary has it.
        eos_token_id: id of the end token, if the vocabulary has it.
        rules: how pieces become bytes; None where the decoder needs to see a piece's neighbours.
        may_break_characters: whether one token may be a part of a character.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.chat_templates: Mapping[str, str] = parts.chat_templates
        named = {**parts.special, "bos_token": parts.bos_token, "eos_token": parts.eos_token}
        self.named_tokens = {k: v for k, v in named.items() if v is not None}
        self.bos_token_id = self._id(parts.bos_token)
        self.eos_token_id = self._id(parts.eos_token)
        steps = decoder_steps(self._backend)
        self._step_names = frozenset(step["type"] for step in steps)
        self.rules = piece_rules(steps)
        self.may_break_characters = bool(self._step_names & {"ByteLevel", "ByteFallback"})
        self._bytes: dict[int, bytes] = {}

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered without the caller bringing a template."""
        return bool(self.chat_templates)

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of the chat templates, sorted."""
        return tuple(sorted(self.chat_templates))

    # -- text to ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text. Other threads run meanwhile (the batch call releases the GIL).

        Raises:
            RequestError: the text is not valid Unicode, or the tokenizer cannot encode it.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts; see `encode`."""
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"only text can be encoded, not {text!r:.80}")
        try:
            encoded = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode") from None
        except Exception as exc:  # the Rust side raises bare Exception, e.g. for a character without an unknown token
            raise RequestError(f"the tokenizer cannot encode the text: {exc}") from exc
        return [e.ids for e in encoded]

    # -- ids to text ------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, exactly what an `IncrementalDetokenizer` gives out in pieces.

        Bytes that are no UTF-8 become U+FFFD; ids that the vocabulary skips have no text.

        Raises:
            RequestError: an id is negative or not below `vocab_size`.
        """
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the vocabulary (0 to {self.vocab_size - 1})")
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def decode_as_one(self, ids: Sequence[int]) -> str:
        """What the Rust decoder makes of these ids, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id, in the vocabulary's own spelling; None if there is none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token inside a text; an id that the vocabulary does not have has none.

        Models may have more logits than the vocabulary has entries, so such ids do occur among log-probabilities.
        """
        known = self._bytes.get(token_id)
        if known is None:
            piece = self.piece(token_id)
            if piece is None:
                return b""
            known = self._bytes[token_id] = self._piece_bytes(token_id, piece)
        return known

    def _piece_bytes(self, token_id: int, piece: str) -> bytes:
        if self.rules is not None:
            return self.rules.to_bytes(piece)
        if "ByteLevel" in self._step_names:
            return PieceRules(alphabet=byte_level_alphabet()).to_bytes(piece)
        if "ByteFallback" in self._step_names and BYTE_PIECE.fullmatch(piece):
            return PieceRules(byte_pieces=True).to_bytes(piece)
        return self.decode_as_one([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """Readable text of one token; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
