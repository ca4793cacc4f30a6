"""Starts the ranks of one host, or joins those that torchrun started."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed
from attrs import frozen

from arbi_core.distributed.channel import TOKEN_BYTES, Listener, connect
from arbi_core.distributed.config_json import check_same, config_to_json
from arbi_core.distributed.control import LOAD_TIMEOUT_S, Control
from arbi_core.distributed.link import Link
from arbi_core.distributed.ranks import FollowingRanks, LeadingRanks
from arbi_core.distributed.torch_group import TorchProcessGroup, open_group
from arbi_core.distributed.workers import LocalWorkers
from arbi_core.errors import ConfigError
from arbi_core.spec import ParallelSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from arbi_core.config.tree import ServerConfig
    from arbi_core.offers import Ranks

__all__ = ["Place", "join_parent", "open_distributed", "torchrun_place"]

dist: Any = torch.distributed
"""Its stubs do not export the stores."""

log = logging.getLogger("arbi.ranks")

START_TIMEOUT_S = 300.0
"""How long the ranks may take to find each other."""

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_groups = itertools.count()
"""Numbers the groups of this process: one store serves them all, and every rank opens them in the same order."""


@frozen
class Place:
    """Where this process stands.

    Attributes:
        rank: 0 drives.
        size: number of ranks.
        device_index: CUDA device on its host.
    """

    rank: int
    size: int
    device_index: int


def torchrun_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """This process's place if torchrun (or what sets the same variables) started it.

    Raises:
        ConfigError: the variables make no sense.
    """
    env = os.environ if environment is None else environment
    if not all(env.get(name) for name in TORCHRUN):
        return None
    try:
        place = Place(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"]))
    except ValueError as exc:
        raise ConfigError("scheduler.executor", f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {exc}") from exc
    if not 0 <= place.rank < place.size:
        raise ConfigError("scheduler.executor", f"RANK is {place.rank}, but WORLD_SIZE is {place.size}")
    return place


def open_distributed(config: ServerConfig) -> Ranks:
    """This process's place among the ranks: rank 0 of processes that it starts, or whatever torchrun made it.

    Raises:
        ConfigError: torchrun started another number of ranks, or there are too few devices.
        RankFailedError: a rank did not come.
    """
    size = config.scheduler.tensor_parallel_size
    place = torchrun_place()
    if place is None:
        return _start_ranks(config, size)
    if place.size != size:
        raise ConfigError(
            "scheduler.tensor_parallel_size",
            f"torchrun started {place.size} ranks, the configuration wants {size}",
            f"--tp {place.size}",
        )
    return _join_torchrun(config, place)


# -- one host ---------------------------------------------------------------------------------------------------------


def _start_ranks(config: ServerConfig, size: int) -> Ranks:
    kind = _device_kind(config, Place(size - 1, size, size - 1))
    threads = max(1, (os.cpu_count() or 1) // size)
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    token = os.urandom(TOKEN_BYTES)
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="arbi-ranks-"))
        workers = LocalWorkers(threads)
        undo.callback(workers.stop)
        listener = Listener("127.0.0.1", size, token)
        undo.callback(listener.close)
        undo.callback(workers.kill)
        store_path = str(Path(folder) / "store")
        order = {
            "config": config_to_json(config),
            "size": size,
            "store": store_path,
            "port": listener.port,
            "token": token.hex(),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        for rank in range(1, size):
            workers.start(rank, {**order, "rank": rank})
        place = Place(0, size, 0)
        return _lead(config, place, kind, dist.FileStore(store_path, size), listener, undo, workers=workers)


def join_parent(config: ServerConfig, link: Link, place: Place, store_path: str) -> FollowingRanks:
    """What a process that `open_distributed` started does to join."""
    kind = _device_kind(config, place)
    return _follow(config, place, kind, dist.FileStore(store_path, place.size), link, one_host=True)


# -- torchrun ---------------------------------------------------------------------------------------------------------


def _join_torchrun(config: ServerConfig, place: Place) -> Ranks:
    kind = _device_kind(config, place)
    store = _torchrun_store(place)
    host = os.environ["MASTER_ADDR"]
    if place.rank == 0:
        with contextlib.ExitStack() as undo:
            token = os.urandom(TOKEN_BYTES)
            listener = Listener(host, place.size, token)
            undo.callback(listener.close)
            meeting = {"port": listener.port, "token": token.hex(), "config": config_to_json(config)}
            store.set("control", json.dumps(meeting))
            return _lead(config, place, kind, store, listener, undo, one_host=host in LOOPBACK)
    meeting = json.loads(store.get("control"))
    sock = connect(host, meeting["port"], bytes.fromhex(meeting["token"]), place.rank, START_TIMEOUT_S)
    link = Link(sock, timeout_s=config.scheduler.rank_timeout_s)
    with link.reporting():
        check_same(config_to_json(config), meeting["config"], place.rank)
        return _follow(config, place, kind, store, link, one_host=host in LOOPBACK)


def _torchrun_store(place: Place) -> Store:
    """The store that torchrun's variables lead to, with keys of this group's own."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.size, timeout=timeout)))
    store.set_timeout(timeout)
    own: Store = dist.PrefixStore(f"arbi/{next(_groups)}", store)
    return own


# -- both -------------------------------------------------------------------------------------------------------------


def _lead(
    config: ServerConfig,
    place: Place,
    kind: str,
    store: Store,
    listener: Listener,
    undo: contextlib.ExitStack,
    *,
    workers: LocalWorkers | None = None,
    one_host: bool = True,
) -> LeadingRanks:
    """Wait for the others, then make the group with them. On success `undo` is taken over by the ranks."""
    group: TorchProcessGroup | None = None
    timeout_s = config.scheduler.rank_timeout_s

    def fault() -> None:
        if workers is not None:
            workers.kill()
        if group is not None:
            group.abort()

    sockets = listener.join(START_TIMEOUT_S, (lambda: None) if workers is None else workers.check)
    control = Control(
        sockets,
        timeout_s=timeout_s,
        collectives=lambda: 0 if group is None else group.collectives,
        describe=(lambda _: "closed its connection") if workers is None else workers.describe,
        on_failure=fault,
    )
    undo.callback(control.close)
    # A collective on the CPU gives up a little later than the control channel, which knows more of the reason.
    group = _unless_failed(control, lambda: _open(store, place, kind, timeout_s + 5.0, one_host=one_host))
    kept = undo.pop_all()
    return LeadingRanks(group, place.device_index, control, lambda: _release(kept, workers))


def _release(kept: contextlib.ExitStack, workers: LocalWorkers | None) -> None:
    """After the end: the others get the time to leave by themselves before `kept` kills what is left."""
    if workers is not None:
        workers.stop()
    kept.close()


def _follow(
    config: ServerConfig, place: Place, kind: str, store: Store, link: Link, *, one_host: bool
) -> FollowingRanks:
    # How long rank 0 may leave this rank waiting is rank 0's to say: it is noticed when rank 0 is gone.
    group = _open(store, place, kind, LOAD_TIMEOUT_S, one_host=one_host)
    log.info("rank %d of %d joined (%s)", place.rank, config.scheduler.tensor_parallel_size, kind)
    return FollowingRanks(group, place.device_index, link)


def _open(store: Store, place: Place, kind: str, timeout_s: float, *, one_host: bool) -> TorchProcessGroup:
    if kind == "cuda":
        torch.cuda.set_device(place.device_index)
    spec = ParallelSpec(place.rank, place.size)
    return open_group(store, spec, kind, connect_timeout_s=START_TIMEOUT_S, timeout_s=timeout_s, one_host=one_host)


def _device_kind(config: ServerConfig, place: Place) -> str:
    """``cpu`` or ``cuda``. Raises `ConfigError` if this place's device is not there."""
    from arbi_core.engine.rank import choose_device

    return choose_device(config.model.device, cast("Ranks", place)).type


def _unless_failed(control: Control, work: Callable[[], TorchProcessGroup]) -> TorchProcessGroup:
    """Run `work`, which waits for the other ranks and cannot be interrupted, but give up when one is lost."""
    done = threading.Event()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as exc:  # noqa: BLE001  # raised by the caller's thread
            outcome.append(exc)
        done.set()

    threading.Thread(target=run, name="arbi-ranks-meet", daemon=True).start()
    while not done.wait(0.05):
        control.raise_if_failed()
    if isinstance(outcome[0], BaseException):
        control.raise_if_failed()
        raise outcome[0]
    return cast("TorchProcessGroup", outcome[0])
