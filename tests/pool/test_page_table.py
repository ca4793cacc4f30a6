"""The page table against a plain model: conservation, sharing, isolation, eviction."""

import pytest

from arbi_core.pool import Namespace, PagePool, PageTable, PoolExhausted

SIZE = 2


def table(pages=16, **options):
    return PageTable(PagePool(pages, SIZE), **options)


def run_to(t, name, tokens, **options):
    """Register, compute everything, commit."""
    matched = t.add(name, tokens, **options)
    t.extend(name, len(tokens) - matched)
    t.commit(name, tokens)
    return matched


def test_lone_request_gets_consecutive_pages():
    t = table()
    t.add("a", range(3))
    assert list(t.extend("a", 3)) + list(t.extend("a", 5)) == [1, 2, 3, 4]


def test_match_is_the_longest_whole_page_prefix():
    t = table()
    run_to(t, "a", [1, 2, 3, 4, 5])
    t.release("a", [1, 2, 3, 4, 5])
    assert t.add("b", [1, 2, 3, 4, 9, 9]) == 4
    assert t.add("c", [1, 2, 3, 4], max_match=3) == 2
    assert t.add("d", [1, 9, 3, 4]) == 0


def test_output_pages_are_found_by_the_next_turn():
    t = table()
    run_to(t, "a", [1, 2, 3])
    t.extend("a", 3)
    t.release("a", [1, 2, 3, 7, 8, 9])
    assert t.add("b", [1, 2, 3, 7, 8, 9, 5]) == 6


def test_pages_beyond_the_written_length_are_not_committed():
    t = table()
    t.add("a", [1, 2, 3, 4])
    t.extend("a", 3)
    t.release("a", [1, 2, 3, 4])
    assert t.peek([1, 2, 3, 4]) == 2


def test_namespaces_share_nothing():
    t = table()
    run_to(t, "a", [1, 2, 3, 4], namespace=Namespace("x"))
    assert t.add("b", [1, 2, 3, 4], namespace=Namespace("y")) == 0
    assert t.add("c", [1, 2, 3, 4], namespace=Namespace("x")) == 4


def test_request_with_caching_off_neither_reads_nor_writes():
    t = table()
    run_to(t, "a", [1, 2, 3, 4])
    assert t.add("b", [1, 2, 3, 4], cache_enabled=False) == 0
    t.extend("b", 4)
    t.release("a")
    t.flush()
    t.release("b", [1, 2, 3, 4])
    assert t.peek([1, 2, 3, 4]) == 0


def test_concurrent_twins_share_what_follows():
    """Both compute the prefix; the second's later pages hang below the first's node and are found."""
    t = table()
    t.add("a", [1, 2])
    t.add("b", [1, 2])
    t.extend("a", 2)
    t.extend("b", 2)
    t.commit("a", [1, 2])
    t.extend("b", 2)
    t.release("b", [1, 2, 5, 6])
    t.check()
    assert t.peek([1, 2, 5, 6]) == 4


def test_eviction_takes_leaves_least_recently_used_first():
    t = table(pages=5)
    run_to(t, "old", [1, 2, 3, 4])
    t.release("old")
    run_to(t, "new", [7, 8])
    t.release("new")
    t.add("big", range(50, 56), namespace=Namespace("z"))
    t.extend("big", 4)
    assert t.peek([1, 2, 3, 4]) == 2, "the leaf went before its parent, and before the newer page"
    assert t.peek([7, 8]) == 2
    assert t.evictions == 1


def test_exhaustion_changes_nothing():
    t = table(pages=3)
    t.add("a", range(10))
    t.extend("a", 4)
    with pytest.raises(PoolExhausted, match="1 pages are needed and 0 are available"):
        t.extend("a", 1)
    assert t.length("a") == 4
    t.check()


def test_flush_frees_idle_pages_and_hides_live_ones():
    t = table()
    run_to(t, "live", [1, 2, 3, 4])
    run_to(t, "idle", [5, 6])
    t.release("idle")
    assert t.flush("") == 1
    assert t.peek([1, 2, 3, 4]) == 0
    t.check()
    t.release("live", [1, 2, 3, 4])
    assert t.available == t.total_pages


def test_digests_accept_negative_and_huge_ids():
    t = table()
    tokens = [-1, 2**63 + 5, -(2**62), 2**64 - 1]
    run_to(t, "a", tokens)
    assert t.peek(tokens) == 4


def test_unknown_request_raises():
    with pytest.raises(KeyError):
        table().release("nobody")


def test_prompt_is_computed_to_its_last_token_even_on_a_full_match():
    t = table()
    run_to(t, "a", [1, 2, 3, 4])
    assert t.add("b", [1, 2, 3, 4], max_match=3) == 2
    assert list(t.pages("b")) == list(t.pages("a"))[:1]


def test_shared_pages_are_not_handed_out_while_someone_holds_them():
    t = table(pages=4)
    run_to(t, "a", [1, 2])
    t.add("b", [1, 2, 3])
    t.release("a", [1, 2])
    shared = t.pages("b")[0]
    t.add("c", range(9), cache_enabled=False)
    assert shared not in t.extend("c", 4)
    with pytest.raises(PoolExhausted):
        t.extend("c", 1)


def test_twin_keeps_its_own_page_and_gives_it_back():
    t = table()
    t.add("a", [1, 2])
    t.add("b", [1, 2])
    t.extend("a", 2)
    t.extend("b", 2)
    t.commit("a", [1, 2])
    t.commit("b", [1, 2])
    assert list(t.pages("a")) != list(t.pages("b"))
    t.release("b", [1, 2])
    t.check()
    assert t.available == t.total_pages - 1, "the twin's page is free again, the cached one is held"


def test_cached_pages_never_deny_a_request():
    t = table(pages=9)
    for i in range(4):
        run_to(t, f"r{i}", [i, i, i, i])
        t.release(f"r{i}")
    assert t.pool.available == 0
    assert t.available == t.total_pages == 8
    t.add("big", range(16), cache_enabled=False)
    assert len(t.extend("big", 16)) == 8
    assert t.cached_pages == 0
    t.check()


def test_use_renews_a_prefix():
    t = table(pages=4)
    for i in range(3):
        run_to(t, f"r{i}", [i, i])
        t.release(f"r{i}")
    t.add("again", [0, 0])
    t.release("again")
    t.add("new", [7, 7], cache_enabled=False)
    t.extend("new", 2)
    assert [t.peek([i, i]) for i in range(3)] == [2, 0, 2]


def test_looking_claims_and_renews_nothing():
    t = table(pages=3)
    for i in range(2):
        run_to(t, f"r{i}", [i, i])
        t.release(f"r{i}")
    assert t.peek([0, 0]) == 2
    t.add("new", [7, 7], cache_enabled=False)
    t.extend("new", 2)
    assert t.peek([0, 0]) == 0
    assert t.queries == 2


def test_one_page_serves_one_request_after_another():
    t = table(pages=2)
    for i in range(5):
        t.add("a", [i, i], max_match=1)
        assert t.extend("a", 2) == [1]
        t.release("a", [i, i])
        t.check()
    assert t.evictions == 4


def test_offers_for_eviction_do_not_pile_up_without_pressure():
    t = table(pages=4)
    for _ in range(300):
        run_to(t, "a", [1, 2], max_match=2)
        t.release("a")
    t.check()


def test_short_lived_namespaces_leave_nothing_behind():
    t = table(pages=3)
    for i in range(20):
        run_to(t, "a", [1, 2], namespace=Namespace(f"n{i}"))
        t.release("a")
        t.check()
    t.flush()
    t.check()
    assert t.available == t.pool.available == t.total_pages


def test_flushed_request_commits_nothing_more():
    t = table()
    run_to(t, "a", [1, 2])
    t.flush("")
    t.extend("a", 2)
    t.release("a", [1, 2, 3, 4])
    t.check()
    assert t.peek([1, 2, 3, 4]) == 0
    assert t.pool.available == t.total_pages


def test_flush_of_one_namespace_leaves_the_others():
    t = table()
    for ns in "xy":
        run_to(t, ns, [1, 2], namespace=Namespace(ns))
        t.release(ns)
    assert t.flush("x") == 1
    assert t.flush("nobody") == 0
    assert t.peek([1, 2], Namespace("y")) == 2


def test_disabled_table_shares_nothing():
    t = table(enabled=False)
    run_to(t, "a", [1, 2])
    t.release("a", [1, 2])
    assert t.add("b", [1, 2]) == 0
    assert t.available == t.pool.available
    assert t.queries == 0


def test_registering_an_id_twice_or_shrinking_is_refused():
    t = table()
    t.add("a", [1])
    with pytest.raises(ValueError, match="'a' is already registered"):
        t.add("a", [1])
    with pytest.raises(ValueError, match="cannot be extended by -1 tokens"):
        t.extend("a", -1)
    t.check()


def test_ids_that_cannot_be_tokens_change_nothing():
    t = table()
    run_to(t, "a", [1, 2])
    with pytest.raises((TypeError, ValueError)):
        t.add("b", ["x", "y"])
    t.check()
    with pytest.raises(KeyError):
        t.length("b")
