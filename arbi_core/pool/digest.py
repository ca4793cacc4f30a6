"""Chained digests that name a prefix: one 32-byte link per page (a Merkle chain), seeded by the namespace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["namespace_seed", "page_digest"]

_MASK = (1 << 64) - 1


def namespace_seed(namespace: str) -> bytes:
    """Root of a namespace's chains, 32 bytes."""
    raw = namespace.encode()
    return hashlib.sha256(b"arbi/ns" + len(raw).to_bytes(8, "little") + raw).digest()


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's digest, the token count and the ids as 64-bit little-endian two's complement.

    Negative ids and ids of 2^63 and above (salts of media placeholders) are folded to their low 64 bits.
    """
    h = hashlib.sha256(parent)
    h.update(len(token_ids).to_bytes(8, "little"))
    h.update(b"".join((t & _MASK).to_bytes(8, "little") for t in token_ids))
    return h.digest()
