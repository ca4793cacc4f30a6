"""The prefix cache in use: who finds what, what goes first, what a flush forgets, what trim and restore do."""

import pytest

from arbi_core.pool import Namespace, PagePool, PageTable, PoolExhausted, Prefix
from arbi_core.pool.digest import pack_tokens

SIZE, SHARED = 2, Namespace()


def table(pages=16):
    return PageTable(PagePool(pages, SIZE))


def leave(t, tokens, namespace=SHARED):
    """Run a request to its end; its full pages stay in the cache."""
    matched = t.add("x", tokens, namespace=namespace)
    t.extend("x", len(tokens) - matched)
    t.release("x", tokens)


def take(t, pages):
    """Hold so many pages that the cache must give some up."""
    t.add("taker", [], cache_enabled=False)
    t.extend("taker", pages * SIZE)
    t.check()


def cached(t, *texts, namespace=SHARED):
    return [t.peek(text, namespace) for text in texts]


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_leaves_go_before_the_pages_that_they_hang_on():
    t = table(pages=5)
    leave(t, [1, 1, 2, 2, 3, 3, 4, 4])
    for taken, left in [(1, 6), (1, 4), (1, 2), (1, 0)]:
        t.cache.evict(taken)
        t.check()
        assert t.peek([1, 1, 2, 2, 3, 3, 4, 4]) == left
    assert t.evictions == 4


def test_branches_go_by_last_use_and_their_root_last():
    t = table(pages=7)
    old, new = [1, 1, 2, 2], [1, 1, 3, 3]
    leave(t, old)
    leave(t, new)
    leave(t, [9, 9])
    for pages, left in [(2, [4, 4, 2]), (3, [2, 4, 2]), (4, [2, 2, 2]), (5, [0, 0, 2]), (6, [0, 0, 0])]:
        take(t, pages)
        assert cached(t, old, new, [9, 9]) == left, pages
        t.release("taker")


def test_held_page_keeps_the_path_to_it():
    t = table(pages=6)
    leave(t, [1, 1, 2, 2, 3, 3])
    t.add("holder", [1, 1, 2, 2], max_match=4)
    take(t, 3)
    assert cached(t, [1, 1, 2, 2, 3, 3]) == [4]
    with pytest.raises(PoolExhausted):
        t.extend("taker", 1)
    t.release("holder")
    assert len(t.extend("taker", 4)) == 2


def test_evictable_pages_count_as_available():
    t = table(pages=6)
    assert (t.available, t.cached_pages, t.pool.available) == (5, 0, 5)
    leave(t, [1, 1, 2, 2, 3])
    assert (t.available, t.cached_pages, t.pool.available) == (5, 2, 3)
    t.add("holder", [1, 1, 9])
    assert (t.available, t.cached_pages, t.pool.available) == (4, 1, 3)
    t.extend("holder", 1)
    assert (t.available, t.cached_pages, t.pool.available) == (3, 1, 2)


def test_page_on_its_way_out_is_shown_before_it_goes():
    t = table(pages=3)
    seen = []
    t.cache.on_evict = lambda node: seen.append((node.page, node.depth, t.peek([1, 1, 2, 2])))
    leave(t, [1, 1, 2, 2])
    take(t, 2)
    assert seen == [(2, 2, 4), (1, 1, 2)]


# -- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "same"),
    [([-1, -2], [2**64 - 1, 2**64 - 2]), ([2**63, 5], [-(2**63), 5]), ([2**64 + 7, 0], [7, 0])],
)
def test_ids_are_told_apart_by_their_low_64_bits(one, same):
    t = table()
    leave(t, one)
    assert cached(t, one, same) == [2, 2]
    assert cached(t, [one[0] + 1, one[1]], [one[1], one[0]]) == [0, 0]


def test_negative_and_small_ids_are_different():
    t = table()
    leave(t, [-1, -1])
    assert cached(t, [1, 1], [2**32 - 1, 2**32 - 1], [-1, -1]) == [0, 0, 2]


def test_digest_of_a_walk_is_the_digest_of_its_node():
    t = table()
    tokens = [-5, 2**63 + 1, 7, 8]
    leave(t, tokens, Namespace("t", "a"))
    prefix = Prefix.of(tokens, SIZE, Namespace("t", "a"))
    assert t.cache.match(prefix) == 2
    assert [n.digest for n in prefix.nodes] == [prefix.digest(1), prefix.digest(2)]
    assert prefix.digest(0) == Namespace("t", "a").seed
    assert Prefix.of(tokens, SIZE, Namespace("t")).digest(2) != prefix.digest(2)


@pytest.mark.parametrize(
    "other", [Namespace("t"), Namespace("", "a"), Namespace("ta"), Namespace("a", "t"), Namespace("t", "b")]
)
def test_namespaces_are_tenant_and_adapter(other):
    t = table()
    leave(t, [1, 2, 3, 4], Namespace("t", "a"))
    assert t.peek([1, 2, 3, 4], other) == 0
    assert t.peek([1, 2, 3, 4], Namespace("t", "a")) == 4


# -- walks ------------------------------------------------------------------------------------------------------------


def test_walk_goes_on_where_it_ended_and_steps_back_from_what_is_gone():
    t = table(pages=4)
    prefix = Prefix.of([1, 1, 2, 2, 3, 3], SIZE, Namespace())
    assert t.cache.match(prefix) == 0
    leave(t, [1, 1])
    assert t.cache.match(prefix) == 1
    leave(t, [1, 1, 2, 2, 3, 3])
    assert t.cache.match(prefix) == 3
    t.cache.evict(2)
    assert t.cache.match(prefix) == 1
    t.flush()
    assert t.cache.match(prefix) == 0
    leave(t, [1, 1])
    assert t.cache.match(prefix) == 1


def test_next_page_has_one_name_for_all_who_share_it():
    t = table()
    leave(t, [1, 1])
    walks = [Prefix.of(ids, SIZE, Namespace()) for ids in ([1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 4, 4], [1, 1, 2])]
    for walk in walks:
        t.cache.match(walk)
    names = [t.cache.next_key(walk) for walk in walks]
    assert names[0] == names[1] != names[2]
    assert names[3] is None, "no full page is left"
    t.add("runner", [1, 1, 2, 2], max_match=3)
    assert t.next_key("runner", [1, 1, 2, 2]) == names[0]
    t.extend("runner", 2)
    t.commit("runner", [1, 1, 2, 2])
    assert t.next_key("runner", [1, 1, 2, 2]) is None


# -- flush ------------------------------------------------------------------------------------------------------------


def test_flush_of_a_tenant_takes_all_its_adapters_and_nobody_else():
    t = table()
    for namespace in (Namespace("t"), Namespace("t", "a"), Namespace("u"), Namespace()):
        leave(t, [1, 2], namespace)
    assert t.flush("t") == 2
    assert [t.peek([1, 2], n) for n in (Namespace("t"), Namespace("t", "a"), Namespace("u"), Namespace())] == [
        0,
        0,
        2,
        2,
    ]
    assert t.flush("") == 1
    assert t.flush() == 1
    assert t.pool.available == t.total_pages
    t.check()


def test_namespace_fills_again_after_a_flush_beside_those_who_ran_through_it():
    t = table()
    t.add("runner", [1, 1, 2, 2])
    t.extend("runner", 4)
    t.commit("runner", [1, 1])
    t.flush()
    leave(t, [1, 1, 5, 5])
    t.commit("runner", [1, 1, 2, 2])
    t.check()
    assert cached(t, [1, 1, 2, 2], [1, 1, 5, 5]) == [2, 4]
    t.release("runner", [1, 1, 2, 2])
    t.check()
    assert cached(t, [1, 1, 2, 2]) == [2]


# -- trim and restore -------------------------------------------------------------------------------------------------


def test_trim_gives_back_whole_pages_beyond_the_length():
    t = table()
    t.add("a", [1, 1, 2, 2])
    t.extend("a", 9)
    assert t.trim("a", 6) == 2
    assert (t.length("a"), list(t.pages("a"))) == (6, [1, 2, 3])
    assert t.trim("a", 5) == 0
    assert t.extend("a", 2) == [4]
    t.check()


@pytest.mark.parametrize("length", [3, 9, -1])
def test_trim_into_committed_pages_or_beyond_the_room_is_refused(length):
    t = table()
    t.add("a", [1, 1, 2, 2])
    t.extend("a", 8)
    t.commit("a", [1, 1, 2, 2])
    with pytest.raises(ValueError, match=f"'a' cannot be trimmed to {length} tokens"):
        t.trim("a", length)
    assert t.trim("a", 4) == 2
    t.check()


def test_restored_pages_are_nodes_at_once():
    t = table()
    leave(t, [1, 1])
    t.add("a", [1, 1, 2, 2, 3, 3, 4])
    loads = []
    assert t.restore("a", [pack_tokens([2, 2]), pack_tokens([3, 3])], lambda i, page: loads.append((i, page))) == 4
    assert loads == [(0, 2), (1, 3)]
    assert (t.length("a"), t.committed_pages("a")) == (6, 3)
    assert t.peek([1, 1, 2, 2, 3, 3]) == 6
    t.check()
    t.release("a")
    assert t.peek([1, 1, 2, 2, 3, 3]) == 6
    t.check()


def test_restored_page_that_somebody_else_has_computed_meanwhile_is_a_twin():
    t = table()
    t.add("a", [1, 1, 2])
    leave(t, [1, 1])
    loads = []
    t.restore("a", [pack_tokens([1, 1])], lambda i, page: loads.append(page))
    assert loads == list(t.pages("a"))
    assert t.cached_pages == 0
    t.check()
    t.release("a")
    assert (t.cached_pages, t.pool.available) == (1, t.total_pages - 1)
    t.check()


def test_restore_without_room_changes_nothing():
    t = table(pages=3)
    t.add("other", [], cache_enabled=False)
    t.extend("other", 2)
    t.add("a", [1, 1, 2, 2, 3])
    with pytest.raises(PoolExhausted):
        t.restore("a", [pack_tokens([1, 1]), pack_tokens([2, 2])], lambda i, page: pytest.fail("nothing may be loaded"))
    assert (t.length("a"), list(t.pages("a"))) == (0, [])
    t.check()


def test_restore_after_a_flush_restores_nothing():
    t = table()
    t.add("a", [1, 1, 2])
    t.flush()
    assert t.restore("a", [pack_tokens([1, 1])], lambda i, page: pytest.fail("nothing may be loaded")) == 0
