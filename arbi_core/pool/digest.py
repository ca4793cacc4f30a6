"""Chained digests that name a prefix: one 32-byte link per page (a Merkle chain), seeded by the namespace."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["namespace_seed", "pack_tokens", "page_digest"]

_MASK = (1 << 64) - 1


def namespace_seed(tenant: str, adapter: str = "") -> bytes:
    """Root of a namespace's chains, 32 bytes. Both names are length-prefixed, so that no pair reads as another."""
    parts = b"".join(len(raw).to_bytes(8, "little") + raw for raw in (tenant.encode(), adapter.encode()))
    return hashlib.sha256(b"arbi/ns" + parts).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The ids as 64-bit little-endian two's complement, 8 bytes each.

    Negative ids and ids of 2^63 and above (salts of media placeholders) are folded to their low 64 bits.
    """
    try:
        return struct.pack(f"<{len(token_ids)}q", *token_ids)
    except struct.error:
        return b"".join((int(t) & _MASK).to_bytes(8, "little") for t in token_ids)


def page_digest(parent: bytes, packed: bytes) -> bytes:
    """SHA-256 over the parent's 32-byte digest, the number of tokens (8 bytes, little-endian) and the packed tokens."""
    return hashlib.sha256(parent + (len(packed) // 8).to_bytes(8, "little") + packed).digest()
