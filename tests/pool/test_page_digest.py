"""The chain of digests, against the same chain spelled out with the standard library."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbi_core.pool.digest import namespace_seed, pack_tokens, page_digest


@given(parent=st.binary(min_size=32, max_size=32), ids=st.lists(st.integers(-(2**63), 2**64 - 1), max_size=20))
def test_digest_covers_parent_length_and_wrapped_ids(parent, ids):
    spelled = len(ids).to_bytes(8, "little") + b"".join((i % 2**64).to_bytes(8, "little") for i in ids)
    assert page_digest(parent, pack_tokens(ids)) == hashlib.sha256(parent + spelled).digest()


@pytest.mark.parametrize("ids", [[-1], [2**63], [2**64 - 1, 0], [-(2**63), 2**63 - 1]])
def test_ids_take_eight_bytes_each(ids):
    packed = pack_tokens(ids)
    assert len(packed) == 8 * len(ids)
    assert [int.from_bytes(packed[i : i + 8], "little") for i in range(0, len(packed), 8)] == [i % 2**64 for i in ids]


def test_seed_depends_on_the_whole_name():
    assert len({namespace_seed(n) for n in ["", "a", "b", "ab", "a\0b", "a:b", "ä"]}) == 7


def test_same_page_has_another_digest_under_another_prefix_or_namespace():
    page = pack_tokens([1, 2])
    chains = set()
    for name in "xy":
        seed = namespace_seed(name)
        chains |= {page_digest(seed, page), page_digest(page_digest(seed, page), page)}
    assert len(chains) == 4
