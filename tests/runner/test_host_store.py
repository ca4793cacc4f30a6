"""The host store against a simple model, whatever its thread has or has not done yet."""

import errno
import logging
import random
import tempfile
import threading
import time
import weakref

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbi_core.errors import EngineClosedError
from arbi_core.runner.blob_files import BlobFiles
from arbi_core.runner.host_store import HostStore
from arbi_core.scheduler.plan import TransferOp, TransferResult

SPILL, FETCH = TransferOp.SPILL, TransferOp.FETCH


def content(handle: int, nbytes: int = 100) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(handle).randbytes(nbytes)), dtype=torch.uint8)


class GatedFiles(BlobFiles):
    """Blob files whose operations each wait for a permit before and after; full once told so."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = threading.Semaphore(0)
        self.open = self.full = False
        self.started = 0

    def wait(self):
        if not self.open:
            self.gate.acquire()

    def write(self, handle, payload):
        self.started += 1
        self.wait()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        blob = super().write(handle, payload)
        self.wait()
        return blob

    def read(self, blob, into):
        self.started += 1
        self.wait()
        super().read(blob, into)
        self.wait()

    def open_gate(self):
        self.open = True
        self.gate.release(2)  # only one operation at a time waits


def drained(store: HostStore) -> list[TransferResult]:
    results, deadline = [], time.monotonic() + 10
    while store.pending:
        assert time.monotonic() < deadline, "the store owes results"
        results += store.poll()
        time.sleep(0.0005)
    return results


def blobs(files: BlobFiles) -> list[str]:
    return sorted(p.name for p in files.path.iterdir() if p.suffix in (".blob", ".part"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def wait_for_files(files: BlobFiles, count: int) -> None:
    wait_until(lambda: len(blobs(files)) == count)


@pytest.fixture
def files(tmp_path):
    return BlobFiles(tmp_path / "tier")


@pytest.fixture
def store(files):
    with HostStore(files) as store:
        yield store


@pytest.fixture
def gated(tmp_path):
    files = GatedFiles(tmp_path / "tier")
    with HostStore(files) as store:
        yield store, files
        files.open_gate()


def on_disk(store: HostStore, handle: int, nbytes: int = 100) -> None:
    store.put(handle, content(handle, nbytes))
    store.spill(handle)
    assert drained(store) == [TransferResult(SPILL, handle, True)]


class StoreMachine(RuleBasedStateMachine):
    """The model: where each handle was last ordered to, and which orders are not answered yet."""

    encrypt = False
    max_in_flight_bytes = 10**6

    def __init__(self):
        super().__init__()
        self.tmp = tempfile.TemporaryDirectory()
        self.files = GatedFiles(self.tmp.name, encrypt=self.encrypt)
        self.store = HostStore(self.files, max_in_flight_bytes=self.max_in_flight_bytes)
        self.next = 1
        self.place: dict[int, str] = {}
        self.owed: dict[int, list[TransferOp]] = {}
        self.lost: set[int] = set()
        self.faults = self.max_in_flight_bytes < 10**6

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.place)))

    @rule()
    def put(self):
        self.store.put(self.next, content(self.next))
        self.place[self.next], self.owed[self.next] = "ram", []
        self.next += 1

    @precondition(lambda self: self.place)
    @rule(data=st.data(), orders=st.lists(st.sampled_from(["spill", "fetch"]), min_size=1, max_size=3))
    def order(self, data, orders):
        handle = self.pick(data)
        for order in orders:
            getattr(self.store, order)(handle)
            self.place[handle] = {"spill": "disk", "fetch": "ram"}[order]
            self.owed[handle].append({"spill": SPILL, "fetch": FETCH}[order])

    @precondition(lambda self: self.place)
    @rule(data=st.data())
    def drop(self, data):
        handle = self.pick(data)
        self.store.drop(handle)
        del self.place[handle], self.owed[handle]
        self.lost.discard(handle)

    @rule()
    def drop_unknown(self):
        self.store.drop(self.next + 1000)

    @rule(permits=st.integers(1, 6), pause=st.sampled_from([0, 0.0002]))
    def let_the_thread_run(self, permits, pause):
        self.files.gate.release(permits)
        time.sleep(pause)

    @precondition(lambda self: self.next > 4)
    @rule(when=st.integers(0, 9))
    def disk_full(self, when):
        if when == 0:
            self.files.full = self.faults = True

    @rule()
    def poll(self):
        self.check(self.store.poll())

    def check(self, results):
        for result in results:
            assert result.op is self.owed[result.handle].pop(0)
            assert bool(result.error) != result.ok
            if not result.ok:
                assert self.faults
                self.lost.add(result.handle)
            else:
                assert result.handle not in self.lost
        for handle, owed in self.owed.items():
            if not owed:
                self.check_bytes(handle)

    def check_bytes(self, handle):
        there = self.place[handle] == "ram" and handle not in self.lost
        try:
            data = self.store.get(handle)
        except KeyError:
            assert not there or self.owed[handle]
        else:
            assert there or self.owed[handle]
            assert torch.equal(data, content(handle))

    @invariant()
    def never_wrong_bytes(self):
        for handle in self.place:
            self.check_bytes(handle)
        assert self.store.pending == sum(map(len, self.owed.values()))

    def teardown(self):
        try:
            self.files.open_gate()
            self.check(drained(self.store))
            assert not any(self.owed.values())
            kept = {p: [h for h in self.place if self.place[h] == p and h not in self.lost] for p in ("ram", "disk")}
            assert self.store.ram_bytes == 100 * len(kept["ram"])
            assert self.store.disk_bytes == 100 * len(kept["disk"])
            wait_for_files(self.files, len(kept["disk"]))
            for handle in kept["disk"]:
                self.store.fetch(handle)
            assert all(result.ok for result in drained(self.store))
            for handle in kept["disk"]:
                assert torch.equal(self.store.get(handle), content(handle))
            wait_for_files(self.files, 0)
        finally:
            self.files.open_gate()
            self.store.close()
            self.tmp.cleanup()


class EncryptedStoreMachine(StoreMachine):
    encrypt = True


class SlowDiskMachine(StoreMachine):
    max_in_flight_bytes = 250


quick = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestAnyHistory = StoreMachine.TestCase
TestAnyHistory.settings = quick
TestAnyEncryptedHistory = EncryptedStoreMachine.TestCase
TestAnyEncryptedHistory.settings = settings(quick, max_examples=20)
TestAnySlowHistory = SlowDiskMachine.TestCase
TestAnySlowHistory.settings = settings(quick, max_examples=40)


def test_bytes_in_ram_are_the_ones_put(store):
    data = content(1)
    store.put(1, data)
    assert store.get(1).data_ptr() == data.data_ptr()
    assert (store.ram_bytes, store.disk_bytes, store.pending) == (100, 0, 0)


def test_get_waits_once_for_the_copy_that_fills_the_bytes(store):
    class Event:
        waits = 0

        def synchronize(self):
            self.waits += 1

    event = Event()
    store.put(1, content(1), event)
    store.get(1)
    store.get(1)
    assert event.waits == 1


def test_spill_waits_for_the_copy_that_fills_the_bytes(store):
    data, filled = torch.zeros(100, dtype=torch.uint8), threading.Event()

    class Event:
        def synchronize(self):
            assert filled.wait(10)

    store.put(1, data, Event())
    store.spill(1)
    data.copy_(content(1))
    filled.set()
    assert drained(store) == [TransferResult(SPILL, 1, True)]
    store.fetch(1)
    assert drained(store)[0].ok
    assert torch.equal(store.get(1), content(1))


def test_device_fault_behind_the_bytes_fails_the_spill_but_not_the_disk(store):
    class Event:
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    store.put(1, content(1), Event())
    store.spill(1)
    (result,) = drained(store)
    assert not result.ok
    assert result.error == "spill of handle 1: CUDA error: an illegal memory access was encountered"
    assert store.disk_error is None
    assert store.ram_bytes == 0


@pytest.mark.parametrize("handle", [1, 2], ids=["unknown", "on-disk"])
def test_get_of_what_is_not_in_ram_names_the_handle(store, handle):
    on_disk(store, 2)
    with pytest.raises(KeyError, match=f"handle {handle} "):
        store.get(handle)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]],
    ids=["float", "2-D", "strided"],
)
def test_other_tensors_are_refused(store, data):
    with pytest.raises(ValueError, match="handle 1: expected a contiguous 1-D uint8 CPU tensor"):
        store.put(1, data)


def test_a_handle_in_use_is_refused(store):
    store.put(1, content(1))
    with pytest.raises(ValueError, match="handle 1 is in use"):
        store.put(1, content(1))


def test_ram_is_freed_after_a_spill_and_the_file_after_a_fetch(store, files):
    on_disk(store, 1)
    assert (store.ram_bytes, store.disk_bytes, len(blobs(files))) == (0, 100, 1)
    store.fetch(1)
    assert drained(store) == [TransferResult(FETCH, 1, True)]
    assert (store.ram_bytes, store.disk_bytes) == (100, 0)
    wait_for_files(files, 0)


def test_bytes_stay_readable_while_they_are_written(gated):
    store, files = gated
    store.put(1, content(1))
    store.spill(1)
    assert torch.equal(store.get(1), content(1))
    assert (store.ram_bytes, store.pending, store.poll()) == (100, 1, ())
    files.open_gate()
    assert drained(store) == [TransferResult(SPILL, 1, True)]
    assert store.ram_bytes == 0


def test_fetch_during_the_spill_is_answered_from_ram(gated):
    store, files = gated
    store.put(1, content(1))
    store.spill(1)
    store.fetch(1)
    assert store.poll() == (TransferResult(SPILL, 1, True), TransferResult(FETCH, 1, True))
    assert torch.equal(store.get(1), content(1))
    files.open_gate()
    wait_for_files(files, 0)


def test_a_fetch_does_not_wait_behind_spills(gated):
    store, files = gated
    files.gate.release(2)
    on_disk(store, 1)
    for handle in (2, 3, 4):
        store.put(handle, content(handle))
        store.spill(handle)
    wait_until(lambda: files.started == 2)
    store.fetch(1)
    files.gate.release(4)  # the spill under way, then the fetch
    results = []
    wait_until(lambda: results.extend(store.poll()) or len(results) == 2)
    assert [(r.op, r.handle) for r in results] == [(SPILL, 2), (FETCH, 1)]


def test_dropping_in_flight_bytes_leaves_no_result_and_no_file(gated):
    store, files = gated
    files.gate.release(2)
    on_disk(store, 1)
    store.fetch(1)
    for handle in (2, 3):
        store.put(handle, content(handle))
        store.spill(handle)
    for handle in (1, 2, 3):
        store.drop(handle)
    assert (store.pending, store.ram_bytes, store.disk_bytes) == (0, 0, 0)
    files.open_gate()
    wait_for_files(files, 0)
    assert store.poll() == ()


def test_orders_for_unknown_handles_fail_and_drops_do_not(store):
    store.drop(1)
    store.spill(1)
    store.fetch(2)
    assert [(r.op, r.handle, r.ok) for r in store.poll()] == [(SPILL, 1, False), (FETCH, 2, False)]


def test_without_a_disk_tier_a_spill_fails_at_once():
    with HostStore() as store:
        store.put(1, content(1))
        store.spill(1)
        (result,) = store.poll()
        assert (result.ok, result.error) == (False, "spill of handle 1: no disk tier")
        with pytest.raises(KeyError):
            store.get(1)
        assert store.disk_error is None
        store.put(2, content(2))
        store.fetch(2)
        assert store.poll() == (TransferResult(FETCH, 2, True),)


def test_full_disk_switches_the_tier_off_with_one_warning(gated, caplog):
    store, files = gated
    files.open_gate()
    on_disk(store, 1)
    files.full = True
    with caplog.at_level(logging.WARNING, "arbi.tiers"):
        for handle in (2, 3):
            store.put(handle, content(handle))
            store.spill(handle)
        results = drained(store)
        files.full = False
        store.put(4, content(4))
        store.spill(4)
        results += store.poll()
    assert [r.ok for r in results] == [False] * 3
    assert all("No space left on device" in r.error for r in results)
    assert "No space left on device" in store.disk_error
    assert [(r.name, r.levelname) for r in caplog.records] == [("arbi.tiers", "WARNING")]
    assert store.ram_bytes == 0
    store.fetch(1)
    assert drained(store) == [TransferResult(FETCH, 1, True)]
    assert torch.equal(store.get(1), content(1))


def test_slow_disk_costs_bytes_instead_of_memory(tmp_path):
    files = GatedFiles(tmp_path)
    with HostStore(files, max_in_flight_bytes=250) as store:
        for handle in (1, 2, 3):
            store.put(handle, content(handle))
            store.spill(handle)
        (result,) = store.poll()
        assert (result.handle, result.ok) == (3, False)
        assert "disk is too slow" in result.error
        assert store.ram_bytes == 200
        files.open_gate()
        assert all(r.ok for r in drained(store))
        on_disk(store, 4)
        on_disk(store, 5, nbytes=1000)  # larger than the limit, but alone
        assert store.disk_error is None


@pytest.mark.parametrize("fault", ["damaged", "truncated", "missing", "link"])
def test_bad_file_fails_its_fetch_with_a_reason(store, files, tmp_path, fault):
    on_disk(store, 1)
    on_disk(store, 2)
    path = files.path / blobs(files)[0]
    whole = path.read_bytes()
    path.unlink()
    if fault == "damaged":
        path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    elif fault == "truncated":
        path.write_bytes(whole[:50])
    elif fault == "link":
        (tmp_path / "copy").write_bytes(whole)
        path.symlink_to(tmp_path / "copy")
    store.fetch(1)
    store.fetch(2)
    first, second = drained(store)
    assert not first.ok
    assert first.error.startswith("fetch of handle 1: ")
    assert second.ok
    with pytest.raises(KeyError):
        store.get(1)
    assert (store.ram_bytes, store.disk_bytes, store.disk_error) == (100, 0, None)
    wait_for_files(files, 0)


def test_fetch_that_gets_no_memory_fails(files):
    def allocate(nbytes):
        raise MemoryError

    with HostStore(files, allocate=allocate) as store:
        on_disk(store, 1)
        store.fetch(1)
        assert [r.error for r in drained(store)] == ["fetch of handle 1: MemoryError"]


def test_a_file_that_cannot_be_removed_switches_the_tier_off(store, files, monkeypatch, caplog):
    on_disk(store, 1)

    def remove(blob):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files, "remove", remove)
    store.drop(1)
    wait_until(lambda: store.disk_error is not None)
    assert "Read-only file system" in store.disk_error


def test_fetched_bytes_are_not_held_after_a_drop(store):
    on_disk(store, 1)
    store.fetch(1)
    drained(store)
    bytes_in_ram = weakref.ref(store.get(1))
    store.drop(1)
    wait_until(lambda: bytes_in_ram() is None)


def test_close_waits_removes_all_files_and_may_be_repeated(tmp_path):
    files = GatedFiles(tmp_path / "tier")
    store = HostStore(files)
    files.gate.release(2)
    on_disk(store, 1)
    for handle in (2, 3):
        store.put(handle, content(handle))
        store.spill(handle)
    threading.Timer(0.02, files.open_gate).start()
    store.close()
    store.close()
    assert list((tmp_path / "tier").iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name == "arbi-host-store"]
    assert (store.ram_bytes, store.disk_bytes, store.pending, store.poll()) == (0, 0, 0, ())
    store.drop(1)
    with pytest.raises(EngineClosedError):
        store.put(4, content(4))
