"""The processes of the other ranks on rank 0's host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from arbi_core.errors import RankFailedError

__all__ = ["LocalWorkers"]

STOP_TIMEOUT_S = 5.0
COMMAND = (sys.executable, "-m", "arbi_core.distributed.worker")
KEPT_LINES = 20
"""Of a worker's last output, for the message when it dies."""


class _Worker:
    """One process; what it prints is passed on with its rank in front."""

    def __init__(self, rank: int, order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.process = subprocess.Popen(  # noqa: S603  # this interpreter and a module of ours
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            text=True,
            errors="replace",
        )
        self._pump = threading.Thread(target=self._pass_on, name=f"arbi-rank-{rank}-output", daemon=True)
        self._pump.start()
        assert self.process.stdin is not None  # noqa: S101  # asked for above
        with contextlib.suppress(BrokenPipeError):
            # The pipe stays open: its end tells the worker that this process is gone.
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None  # noqa: S101  # asked for above
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"[rank {self.rank}] {line}")
                sys.stderr.flush()

    def end(self, timeout_s: float) -> str:
        """How it ended, as a clause; what is known if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {_signal_name(-code)}"
        self._pump.join(1.0)
        last = next((line for line in reversed(self.lines) if line), "")
        return f"ended with status {code}" + (f": {last}" if last else "")

    def reap(self) -> None:
        """Free what the process held. It must have ended."""
        self._pump.join(1.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class LocalWorkers:
    """Starts and ends them.

    Args:
        threads: CPU threads that each may use.
    """

    def __init__(self, threads: int) -> None:
        self._workers: dict[int, _Worker] = {}
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """Start a rank; `order` reaches it through a pipe, as it holds a secret."""
        self._workers[rank] = _Worker(rank, order, self._environment)

    def check(self) -> None:
        """Raise `RankFailedError` if one has ended."""
        for rank, worker in self._workers.items():
            if worker.process.poll() is not None:
                raise RankFailedError(rank, worker.end(0))

    def describe(self, rank: int) -> str:
        """How a rank whose connection closed has ended."""
        return self._workers[rank].end(1.0)

    def kill(self) -> None:
        """End all at once: they may hang where no message reaches them."""
        for worker in self._workers.values():
            worker.process.kill()

    def stop(self) -> None:
        """Wait until all have ended; those that do not are killed. Idempotent."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for worker in self._workers.values():
            worker.process.wait()
            worker.reap()
        self._workers.clear()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
