"""The life of a rank that follows: join, build, carry out steps, end.

``python -m arbi_core.distributed.worker`` is what rank 0 starts on its own host; its order comes by standard input.
Under torchrun every rank runs the user's command, and that calls `run_follower` on all ranks but 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from arbi_core.distributed.channel import connect
from arbi_core.distributed.link import Link
from arbi_core.errors import ArbiError, RankFailedError

if TYPE_CHECKING:
    from arbi_core.config.tree import ServerConfig
    from arbi_core.distributed.ranks import FollowingRanks
    from arbi_core.plugins import Registry

__all__ = ["main", "run_follower"]

log = logging.getLogger("arbi.ranks")

JOIN_TIMEOUT_S = 60.0


def run_follower(config: ServerConfig) -> int:
    """Be the rank that torchrun made this process, until rank 0 ends; returns the exit status.

    Raises:
        ConfigError: this process is rank 0 or no rank at all, or was started with other settings than rank 0.
        ArbiError: the model cannot be built here.
    """
    from arbi_core.distributed.launch import open_distributed
    from arbi_core.distributed.ranks import FollowingRanks
    from arbi_core.errors import ConfigError
    from arbi_core.plugins import load_registry

    registry = load_registry(config.plugins_policy)
    ranks = open_distributed(config)
    if not isinstance(ranks, FollowingRanks):
        ranks.close()
        raise ConfigError("scheduler.executor", "this process is rank 0, which serves; it follows nobody")
    _leave_signals_to_rank_0()
    with ranks.reporting():
        return _follow(config, registry, ranks)


def main() -> int:
    """Be the rank that the order on standard input says; returns the exit status."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="arbi-rank-parent", daemon=True).start()
    _leave_signals_to_rank_0()
    logging.basicConfig(level=order["log_level"], format="%(levelname)s %(name)s: %(message)s")
    rank, size = order["rank"], order["size"]
    sock = connect("127.0.0.1", order["port"], bytes.fromhex(order["token"]), rank, JOIN_TIMEOUT_S)
    # From here on rank 0 hears of everything that goes wrong, the import of torch included.
    link = Link(sock, timeout_s=order["config"]["scheduler"]["rank_timeout_s"])
    try:
        with link.reporting():
            from arbi_core.distributed.config_json import policy_from_json, read_config
            from arbi_core.distributed.launch import Place, join_parent
            from arbi_core.plugins import load_registry

            registry = load_registry(policy_from_json(order["config"]))
            config = read_config(order["config"], registry)
            ranks = join_parent(config, link, Place(rank, size, rank), order["store"])
            return _follow(config, registry, ranks)
    except ArbiError as exc:
        log.error("%s", exc)  # noqa: TRY400  # the message says all; rank 0 shows it too
        return 1


def _follow(config: ServerConfig, registry: Registry, ranks: FollowingRanks) -> int:
    from arbi_core.engine.rank import build_rank

    built = build_rank(config, registry, ranks)
    try:
        ranks.follow(built.runner)
    except RankFailedError as exc:
        log.error("this rank ends: rank %d %s", exc.rank, exc.reason)  # noqa: TRY400  # nothing failed here
        return 1
    finally:
        ranks.close()
        built.runner.close()
    return 0


def _leave_signals_to_rank_0() -> None:
    """A terminal or a supervisor signals all processes at once; rank 0 still has requests to finish with the others."""
    with contextlib.suppress(ValueError):  # not the main thread: then the signals are not ours
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    """Standard input ends when rank 0 does, however it ended."""
    while os.read(0, 1 << 12):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # rank 0 waits for this process, and torch takes a second to come down
