"""Tensor-parallel ranks as threads of one process."""

import threading

import torch

from arbi_core.spec import ParallelSpec


class ThreadGroup:
    """A process group whose ranks are threads that meet at a barrier."""

    def __init__(self, rank, size, barrier, board):
        self.spec = ParallelSpec(rank, size)
        self._barrier, self._board = barrier, board

    def _exchange(self, x):
        self._board[self.spec.rank] = x.clone()
        self._barrier.wait(30)
        parts = list(self._board)
        self._barrier.wait(30)
        return parts

    def all_reduce(self, x):
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x, dim=-1):
        return torch.cat(self._exchange(x), dim)


def on_ranks(size, work):
    """Run `work(group)` on every rank at once; returns the results in rank order."""
    barrier, board, results, errors = threading.Barrier(size), [None] * size, [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadGroup(rank, size, barrier, board))
        except Exception as exc:  # noqa: BLE001  # raised again by the caller's thread
            errors.append(exc)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results
