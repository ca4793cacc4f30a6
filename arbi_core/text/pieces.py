"""How the pieces of a vocabulary become bytes. Torch-free.

Byte-level BPE and SentencePiece have one thing in common: every piece stands for certain bytes, whatever its neighbours
are, and the text is those bytes read as UTF-8. Reading the rules from the tokenizer's decoder once makes decoding a
table look-up per token, and makes streamed text equal to text decoded at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PieceRules", "decoder_steps", "piece_rules"]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@frozen
class PieceRules:
    """Bytes of a piece.

    Attributes:
        alphabet: byte of each character, for byte-level vocabularies; a piece with any other character is plain text.
        space: what stands for a space inside pieces; empty if nothing does.
        byte_pieces: whether pieces like ``<0x0A>`` are single bytes.
        bare_first: the first piece of a text loses its `space` marks instead of turning them into spaces.
        leading: how many spaces the text loses at its beginning, if it begins with any.
    """

    alphabet: Mapping[str, int] | None = None
    space: str = ""
    byte_pieces: bool = False
    bare_first: bool = False
    leading: int = 0

    def to_bytes(self, piece: str) -> bytes:
        """Bytes of a piece that is not the first of its text."""
        return self._bytes(piece, " ")

    def first_to_bytes(self, piece: str) -> bytes:
        """Bytes of a piece that is the first of its text, before the text loses its `leading` spaces."""
        return self._bytes(piece, "" if self.bare_first else " ")

    def _bytes(self, piece: str, space: str) -> bytes:
        if self.alphabet is not None:
            known = [self.alphabet[c] for c in piece if c in self.alphabet]
            return bytes(known) if len(known) == len(piece) else piece.encode()
        match = BYTE_PIECE.fullmatch(piece) if self.byte_pieces else None
        if match is not None:
            return bytes([int(match[1], 16)])
        return (piece.replace(self.space, space) if self.space else piece).encode()


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder in the form that ``tokenizer.json`` has; empty if it has no decoder."""
    decoder = backend.decoder
    if decoder is None:
        return []
    whole = json.loads(decoder.__getstate__())
    return whole["decoders"] if whole["type"] == "Sequence" else [whole]


def piece_rules(steps: Sequence[Mapping[str, Any]]) -> PieceRules | None:
    """The rules that a decoder amounts to, or None if its pieces do not stand for themselves (WordPiece, ...)."""
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return PieceRules(alphabet=byte_level_alphabet())
    if names == ["Metaspace"]:
        return PieceRules(space=steps[0]["replacement"], bare_first=steps[0]["prepend_scheme"] != "never")
    return _sentencepiece(names, {step["type"]: step for step in steps})


def _sentencepiece(names: Sequence[str], steps: Mapping[str, Mapping[str, Any]]) -> PieceRules | None:
    """``[Replace, ByteFallback, Fuse, Strip]``, where bytes and the stripping may be absent."""
    if tuple(n for n in names if n not in {"ByteFallback", "Strip"}) != ("Replace", "Fuse"):
        return None
    order = ("Replace", "ByteFallback", "Fuse", "Strip")
    if list(names) != [n for n in order if n in steps]:
        return None
    replace, strip = steps["Replace"], steps.get("Strip", {"content": " ", "start": 0, "stop": 0})
    mark = replace["pattern"].get("String")
    if not mark or replace["content"] != " " or strip["content"] != " " or strip["stop"]:
        return None
    return PieceRules(space=mark, byte_pieces="ByteFallback" in steps, leading=strip["start"])


def byte_level_alphabet() -> dict[str, int]:
    """Byte of each character that byte-level BPE writes (the printable bijection of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if chr(b) not in alphabet]
    return alphabet | {chr(256 + n): b for n, b in enumerate(hidden)}
