"""Collectives over torch.distributed: gloo on the CPU, NCCL on CUDA."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from arbi_core.errors import ConfigError, EngineFailedError
from arbi_core.spec import ParallelSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

c10d: Any = distributed_c10d
"""Its classes are public, its stubs are not complete."""

__all__ = ["CollectiveError", "TorchProcessGroup", "open_group"]


class CollectiveError(EngineFailedError):
    """A collective did not come about: a rank is gone, or the network between them."""


class TorchProcessGroup:
    """See `arbi_core.distributed.group.ProcessGroup`.

    It is no torch default group: a process that uses torch.distributed for something else keeps its own.

    Args:
        backend: an opened torch process group.
        spec: this rank's position.

    Attributes:
        collectives: how many this rank has entered. Ranks in step have entered the same number.
    """

    def __init__(self, backend: Any, spec: ParallelSpec) -> None:
        self.spec = spec
        self.collectives = 0
        self._backend = backend
        self._reduce = c10d.AllreduceOptions()
        self._gather = c10d.AllgatherOptions()
        for options in (self._reduce, self._gather):
            # On CUDA it then runs on the caller's stream: no events between streams, and graphs capture it.
            options.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where `x` is contiguous. Raises `CollectiveError`."""
        x = x.contiguous()
        self.collectives += 1
        try:
            _wait(self._backend.allreduce([x], self._reduce))
        except RuntimeError as exc:
            raise CollectiveError(f"the sum over {self.spec.size} ranks failed: {exc}") from exc
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim`, in rank order. Raises `CollectiveError`."""
        size, dim = self.spec.size, dim % x.dim()
        x = x.contiguous()
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        self.collectives += 1
        try:
            _wait(self._backend._allgather_base(out, x, self._gather))  # the public name needs a default group
        except RuntimeError as exc:
            raise CollectiveError(f"the gathering over {self.spec.size} ranks failed: {exc}") from exc
        if dim == 0:
            return out
        parts = out.view(size, *x.shape).movedim(0, dim)
        return parts.reshape(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])

    def abort(self) -> None:
        """Make collectives that are on the way give up, where the backend can. The group is then of no more use."""
        self._backend.abort()


def open_group(
    store: Store, spec: ParallelSpec, device: str, *, connect_timeout_s: float, timeout_s: float, one_host: bool
) -> TorchProcessGroup:
    """Connect this rank with the others. All ranks call it.

    Args:
        store: reaches all ranks.
        spec: this rank's position.
        device: ``cpu`` or ``cuda``; for CUDA the current device is the one that is used.
        connect_timeout_s: how long the others may take to come.
        timeout_s: after so long in one collective the others are lost.
        one_host: all ranks are on this host, so that nothing has to leave it.

    Raises:
        ConfigError: this torch has no NCCL.
        CollectiveError: the ranks do not reach each other.
    """
    timeout = timedelta(seconds=connect_timeout_s)
    try:
        backend = _gloo(store, spec, timeout, loopback=one_host) if device == "cpu" else _nccl(store, spec, timeout)
        backend._set_default_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        raise CollectiveError(f"rank {spec.rank} of {spec.size} does not reach the others: {exc}") from exc
    return TorchProcessGroup(backend, spec)


def _gloo(store: Store, spec: ParallelSpec, timeout: timedelta, *, loopback: bool) -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    if not loopback:
        return gloo(store, spec.rank, spec.size, timeout)
    options = gloo._Options()  # the only way to name the interface beside an environment variable
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, spec.rank, spec.size, options)


def _nccl(store: Store, spec: ParallelSpec, timeout: timedelta) -> Any:
    nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
    if nccl is None:
        raise ConfigError("scheduler.tensor_parallel_size", "this torch was built without NCCL", "use --device cpu")
    # A failed collective must not end the process: rank 0 has requests to answer with the reason. 2 is "clean up only".
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = nccl.Options()
    options._timeout = timeout
    backend = nccl(store, spec.rank, spec.size, options)
    # The communicator is made by the first collective. Made now, its memory is there before the KV pool is sized.
    TorchProcessGroup(backend, spec).all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return backend


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
