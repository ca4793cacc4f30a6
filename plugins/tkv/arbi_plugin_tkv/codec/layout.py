"""Where every bit lies: the one place that writer, reader, allocator and kernels ask. Torch-free.

A vector of `dim` numbers is turned into `padded` coordinates (`arbi_plugin_tkv.codec.basis`), and these are cut into a
low half ``a`` and a high half ``b``. Coordinate ``i`` of either half makes pair ``i``: its two codes side by side,
``code_a | code_b << bits_a``, are one field of ``bits_a + bits_b`` bits. Fields are cut into planes of 8, 4 and 2 bits,
lowest bits first, so that the codes of pairs that are apart share a byte and no field straddles one:

====  ==================  =======================================================================
bits  bytes per vector    pairs in one byte (n = padded / 2 pairs)
====  ==================  =======================================================================
8     n                   ``i``
4     n / 2               ``i`` (low), ``i + n / 2`` (high)
2     n / 4               ``i`` (low), ``i + n / 4``, ``i + n / 2``, ``i + 3 n / 4`` (high)
====  ==================  =======================================================================

At 4 bits a number there is one plane of bytes, one pair each, so ``byte & mask`` and ``byte >> bits_a`` are the
operands of 8-bit tensor cores: three logic operations on a 32-bit word give eight codes, whether the halves have 4
and 4 bits or 5 and 3. At 8 bits there are two planes of bytes, one a half.

A page of one layer is ``(kv_heads, block_bytes)`` bytes; the block of one head holds, in this order:

=============  =======================  ==================================================================
part           shape in bytes           why
=============  =======================  ==================================================================
key codes      (page_size, key_bytes)   tokens are rows of ``K q^T``: a token's codes are contiguous
value codes    (value_bytes, page_size) coordinates are rows of ``V^T p^T``: four tokens share a 32-bit word
key words      (page_size, 4)           one 32-bit word of scales and offset per key, coalesced
value words    (page_size, 4)           the same per value
=============  =======================  ==================================================================

With pages of 16 tokens or more every part begins at a multiple of 16 bytes.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["MAX_BITS", "MIN_BITS", "PageLayout", "SideLayout", "page_layout", "side_layout"]

MIN_BITS, MAX_BITS = 2, 8
WORD_BYTES = 4


@frozen
class SideLayout:
    """One side (keys or values) of one layer.

    Attributes:
        dim: width of a vector.
        padded: coordinates stored, the next multiple of 8.
        bits_a: bits of a coordinate of the low half.
        bits_b: bits of a coordinate of the high half.
        planes: ``(bits, first byte)`` of each plane, lowest bits of the field first.
        code_bytes: bytes of codes per vector.
    """

    dim: int
    padded: int
    bits_a: int
    bits_b: int
    planes: tuple[tuple[int, int], ...]
    code_bytes: int

    @property
    def pairs(self) -> int:
        """Pairs of coordinates."""
        return self.padded // 2

    @property
    def vector_bytes(self) -> int:
        """Bytes per vector, the word of scales and offset included."""
        return self.code_bytes + WORD_BYTES


@frozen
class PageLayout:
    """One page of one layer; offsets are bytes from the start of a head's block.

    Attributes:
        page_size: tokens per page.
        key: the side of keys.
        value: the side of values.
        key_codes: where ``(page_size, key.code_bytes)`` begins.
        value_codes: where ``(value.code_bytes, page_size)`` begins.
        key_words: where ``(page_size,)`` 32-bit words of keys begin.
        value_words: where ``(page_size,)`` 32-bit words of values begin.
        block_bytes: bytes of one head's block.
    """

    page_size: int
    key: SideLayout
    value: SideLayout
    key_codes: int
    value_codes: int
    key_words: int
    value_words: int
    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.key.vector_bytes + self.value.vector_bytes

    @property
    def bits_per_number(self) -> float:
        """Bits that one number of a key or value costs, scales and offsets included."""
        return 8.0 * self.slot_bytes / (self.key.dim + self.value.dim)


def side_layout(dim: int, bits: int, skew: int = 0) -> SideLayout:
    """Lay out one side.

    Args:
        dim: width of a vector, at least 1.
        bits: mean bits of a number, 2 to 8.
        skew: the low half has ``bits + skew`` and the high half ``bits - skew``; both from 1 to 8.

    Raises:
        ValueError: a number is out of range.
    """
    if dim < 1:
        raise ValueError(f"a head of {dim} numbers cannot be stored")
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits a number: TKV stores {MIN_BITS} to {MAX_BITS}")
    bits_a, bits_b = bits + skew, bits - skew
    if not (1 <= bits_a <= MAX_BITS and 1 <= bits_b <= MAX_BITS):
        raise ValueError(f"a skew of {skew} makes halves of {bits_a} and {bits_b} bits; both must be 1 to {MAX_BITS}")
    padded = -(-dim // 8) * 8
    planes, at, left = [], 0, 2 * bits
    for width in (8, 8, 4, 2):
        if left >= width:
            planes.append((width, at))
            at += padded // 2 * width // 8
            left -= width
    return SideLayout(dim, padded, bits_a, bits_b, tuple(planes), at)


def page_layout(page_size: int, key: SideLayout, value: SideLayout) -> PageLayout:
    """Lay out a page of `page_size` tokens; the only function that does."""
    value_codes = page_size * key.code_bytes
    key_words = value_codes + page_size * value.code_bytes
    # Words are read as 32-bit integers: an odd page size must not push them off their boundary.
    key_words = -(-key_words // WORD_BYTES) * WORD_BYTES
    value_words = key_words + page_size * WORD_BYTES
    return PageLayout(
        page_size, key, value, 0, value_codes, key_words, value_words, value_words + page_size * WORD_BYTES
    )
