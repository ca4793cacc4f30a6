"""A group of ranks as threads: in step through everything that a single step may do, and ended with a reason else."""

import contextlib
import threading
import time

import pytest

from arbi_core.errors import RankFailedError


def fail(text="no such processor"):
    def raise_it():
        raise RuntimeError(text)

    return raise_it


def test_steps_reach_every_rank_in_order(party):
    group = party(size=3)
    for index in range(5):
        assert group.step(index).result().token_ids.tolist() == [index]
    group.executor.close()
    for thread in group.threads:
        thread.join(5)
    assert group.ends == {1: "closed", 2: "closed"}
    assert [e for e in group.runners[2].log if e[0] == "dispatch"] == [("dispatch", i) for i in range(5)]
    assert group.runners[0].closed


def test_followers_take_results_at_the_same_point_as_rank_0(party):
    """A draw may depend on what the host knows of the earlier ones."""
    group = party()
    first = group.step(0)
    second = group.step(1)
    first.result()
    second.result()
    group.step(2).result()
    group.step(3)
    time.sleep(0.1)
    assert group.runners[1].log == [
        ("dispatch", 0), ("dispatch", 1), ("result", 0), ("result", 1), ("dispatch", 2), ("result", 2), ("dispatch", 3),
    ]  # fmt: skip


def test_the_smallest_value_is_agreed_on(party):
    group = party(size=3, autoready=False)
    found = []
    threads = [
        threading.Thread(target=lambda r=r, v=v: found.append([r.agree_min(v), r.agree_min(100 + v)]))
        for r, v in zip(group.ranks, (7, 5), strict=True)
    ]
    for thread in threads:
        thread.start()
    assert group.control.agree_min(6) == 5
    assert group.control.agree_min(103) == 103
    for thread in threads:
        thread.join(5)
    assert found == [[5, 103]] * 2


@pytest.mark.parametrize("point", [0, 1, 2])
def test_a_step_that_fails_everywhere_at_the_same_point_ends_alone(party, point):
    group = party(size=3, scripts={rank: {(1, point): fail()} for rank in range(3)})
    group.step(0).result()
    with pytest.raises(RuntimeError, match="no such processor"):
        group.step(1)
    assert group.step(2).result().token_ids.tolist() == [2]
    assert group.control.failure is None


def test_a_step_that_fails_on_rank_0_after_the_last_collective_ends_alone(party):
    group = party(scripts={0: {(1, 2): fail("out of memory")}})
    group.step(0).result()
    with pytest.raises(RuntimeError, match="out of memory"):
        group.step(1)
    assert group.step(2).result().token_ids.tolist() == [2]
    assert ("result", 1) not in group.runners[1].log


def test_a_result_that_fails_on_rank_0_ends_the_step_alone(party):
    group = party(scripts={0: {(0, "result"): fail("bad copy")}})
    first = group.step(0)
    second = group.step(1)
    with pytest.raises(RuntimeError, match="bad copy"):
        first.result()
    assert second.result().token_ids.tolist() == [1]
    group.step(2).result()
    assert ("result", 0) not in group.runners[1].log


@pytest.mark.parametrize("point", [0, 1])
def test_a_step_that_fails_on_rank_0_alone_ends_the_group(party, point):
    """The other rank waits in a collective that rank 0 will not enter."""
    group = party(timeout_s=3.0, scripts={0: {(1, point): fail("out of memory")}})
    group.step(0).result()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 .*rank 0 alone failed in a step"):
        group.step(1)
    assert time.monotonic() - start < 2
    with pytest.raises(RankFailedError):
        group.step(2)


@pytest.mark.parametrize("point", [0, 1, 2])
def test_a_step_that_fails_on_another_rank_alone_ends_the_group(party, point):
    group = party(size=3, scripts={2: {(1, point): fail("device lost")}})
    group.step(0).result()
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 2 failed in step 1: RuntimeError: device lost"):
        group.run(1, 200, pause_s=0.01)
    assert time.monotonic() - start < 2


def test_a_result_that_fails_on_another_rank_ends_the_group(party):
    group = party(scripts={1: {(0, "result"): fail("bad copy")}})
    group.step(0).result()
    with pytest.raises(RankFailedError, match="rank 1 failed in step 1: RuntimeError: bad copy"):
        group.step(1)


def test_a_rank_that_is_gone_ends_the_group(party):
    group = party(size=3)
    group.step(0).result()
    group.links[1].close()
    assert group.until_failed(2) == "rank 2 closed its connection"
    assert group.executor.failure == "rank 2 closed its connection"
    with pytest.raises(RankFailedError, match="rank 2"):
        group.step(1)
    for thread in group.threads:
        thread.join(5)
    assert "rank 2 closed its connection" in group.ends[1]


def test_a_rank_that_is_gone_ends_the_group_in_the_middle_of_a_step(party):
    group = party()
    group.runners[1].script[0, 1] = group.links[0].close
    with pytest.raises(RankFailedError, match="rank 1 closed its connection"):
        group.run(0, 2)


@pytest.mark.parametrize("point", [1, 2])
def test_a_rank_that_hangs_is_lost_after_the_timeout(party, point):
    released = threading.Event()
    group = party(timeout_s=0.6, scripts={1: {(1, point): lambda: released.wait(10)}})
    group.step(0).result()
    start = time.monotonic()
    with contextlib.suppress(RankFailedError):  # at point 2 rank 0 has nothing more to wait for in this step
        group.step(1)
    with pytest.raises(RankFailedError, match=r"rank 1 has not finished step 1 within 0.6 s"):
        group.wait_for_failure()
    assert 0.5 < time.monotonic() - start < 2
    released.set()


def test_a_device_that_hangs_is_noticed(party):
    group = party(timeout_s=0.6)
    group.runners[0].script[0, "result"] = lambda: group.until_failed(5) and [0]
    with pytest.raises(RankFailedError, match="has waited for its device"):
        group.step(0).result()


def test_a_silent_rank_is_lost_though_nothing_happens(party):
    group = party(timeout_s=0.6)
    group.step(0).result()
    time.sleep(1.0)
    assert group.control.failure is None, "idleness is no fault"
    with group.links[0]._sending:
        assert "rank 1 has not been heard of for" in group.until_failed(3)


def test_slow_ranks_are_not_lost(party):
    """What counts is how far a rank is behind rank 0, not how long a step takes."""
    group = party(timeout_s=0.5, scripts={0: {(0, 0): lambda: time.sleep(1.2)}, 1: {(0, 0): lambda: time.sleep(1.4)}})
    assert group.step(0).result().token_ids.tolist() == [0]


def test_ranks_that_draw_other_tokens_are_found_out(party):
    group = party(timeout_s=0.4, scripts={1: {(30, "result"): lambda: [31]}})
    group.run(0, 64)
    with pytest.raises(RankFailedError, match="rank 1 drew other tokens than rank 0"):
        group.run(64, 400, pause_s=0.01)


def test_a_follower_without_rank_0_ends_itself(party):
    group = party(autoready=False)
    group.control._shut()
    assert group.lost.wait(5)


def test_a_message_of_why_a_rank_ends_is_the_reason(party):
    group = party(autoready=False)
    with pytest.raises(ValueError, match="torn"), group.ranks[0].reporting():
        raise ValueError("the checkpoint is torn")
    with pytest.raises(RankFailedError, match="rank 1 ended: ValueError: the checkpoint is torn"):
        group.control.wait_ready()


def test_an_interrupted_step_ends_the_group(party):
    def interrupt():
        raise KeyboardInterrupt

    group = party(scripts={0: {(0, 1): interrupt}})
    with pytest.raises(KeyboardInterrupt):
        group.step(0)
    with pytest.raises(RankFailedError, match="rank 0 was interrupted in step 0"):
        group.step(1)


def test_closing_twice_does_no_harm(party):
    group = party()
    group.step(0).result()
    group.executor.close()
    group.executor.close()
    assert group.control.failure is None
