"""Executors ``local`` (one rank, in the engine's own process) and ``distributed`` (several, over torch.distributed)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.api import hookimpl

if TYPE_CHECKING:
    from arbi_core.config.tree import ServerConfig
    from arbi_core.offers import ExecutorFactory, Ranks

__all__ = ["DistributedExecutorFactory", "LocalExecutorFactory"]

arbi_api_version = 1


class LocalExecutorFactory:
    """See `arbi_core.offers.ExecutorFactory`."""

    name = "local"

    def open(self, config: ServerConfig) -> Ranks:  # noqa: ARG002  # the protocol's signature
        """One rank."""
        from arbi_core.distributed.local import LocalRanks

        return LocalRanks()


class DistributedExecutorFactory:
    """See `arbi_core.offers.ExecutorFactory`."""

    name = "distributed"

    def open(self, config: ServerConfig) -> Ranks:
        """Start the other ranks on this host, or join those that torchrun started.

        Raises:
            ConfigError: torchrun started another number of ranks, or there are too few devices.
            RankFailedError: a rank did not come.
        """
        from arbi_core.distributed.launch import open_distributed

        return open_distributed(config)


@hookimpl
def arbi_executors() -> list[ExecutorFactory]:
    """Offer both."""
    return [LocalExecutorFactory(), DistributedExecutorFactory()]
