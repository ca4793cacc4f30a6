"""Every exception that arbi raises on purpose.

Torch-free. Each error says what was wrong, where, and what to do; `status` is the HTTP status a server answers with,
`code` the machine-readable kind in an OpenAI error body.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArbiError",
    "ArbiWarning",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "EngineFailedError",
    "OutOfMemoryError",
    "OverloadedError",
    "PluginConflictError",
    "PluginError",
    "RankFailedError",
    "RequestError",
    "UnknownNameError",
    "UnsupportedModelError",
    "WeightError",
]


class ArbiWarning(UserWarning):
    """A visible fallback: what the user asked for still works, but not in the way they may expect."""


class ArbiError(Exception):
    """Base of all arbi errors."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class ConfigError(ArbiError):
    """A configuration value is unknown, has the wrong type or is out of range.

    Args:
        field: dotted name in the configuration tree, e.g. ``cache.kv_dtype``.
        problem: what is wrong, with the offending value.
        fix: what to write instead.
    """

    status = 400
    code = "invalid_configuration"

    def __init__(self, field: str, problem: str, fix: str = "") -> None:
        self.field, self.problem, self.fix = field, problem, fix
        super().__init__(f"{field}: {problem}" + (f" ({fix})" if fix else ""))


class PluginError(ArbiError):
    """A plugin cannot be imported, speaks another API version or returns something that its hook does not allow."""

    code = "plugin_error"


class PluginConflictError(PluginError):
    """Two plugins offer the same key and the configuration picks neither."""

    code = "plugin_conflict"


class UnknownNameError(ArbiError):
    """A name that no installed plugin offers; the message lists what is installed and what would bring it."""

    status = 400
    code = "unknown_name"


class UnsupportedModelError(ArbiError):
    """An architecture, a config knob or a weight type that no installed plugin can serve exactly."""

    status = 400
    code = "unsupported_model"


class CheckpointError(ArbiError):
    """A checkpoint is missing, truncated, corrupt or inconsistent."""

    status = 400
    code = "bad_checkpoint"


class WeightError(CheckpointError):
    """Tensors are missing, unexpected or misshapen; the message names each of them."""

    code = "bad_weights"


class BackendError(ArbiError):
    """No attention backend can serve a layer on the device; the message has every backend's reason."""

    status = 400
    code = "no_backend"


class OutOfMemoryError(ArbiError):
    """The model or its KV pool does not fit; the message says what would."""

    status = 507
    code = "out_of_memory"


class RequestError(ArbiError, ValueError):
    """One request cannot be served as written. Nothing else in flight is affected.

    Args:
        message: what is wrong and what to do.
        param: name of the offending request field.
        code: machine-readable kind; HTTP clients see it in the error body.
        status: HTTP status.
    """

    status = 400
    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code  # type: ignore[misc]  # an instance may be more precise than its class
        if status is not None:
            self.status = status  # type: ignore[misc]


class OverloadedError(RequestError):
    """The queue is full; try again after `retry_after` seconds."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(ArbiError):
    """The engine is draining or closed and takes no new requests."""

    status = 503
    code = "engine_closed"


class EngineFailedError(ArbiError):
    """The engine stopped on an unrecoverable fault; every request in flight ends with this reason."""

    status = 500
    code = "engine_failed"


class RankFailedError(EngineFailedError):
    """A tensor-parallel rank died, stopped answering or fell out of step, so the whole group has ended.

    Args:
        rank: which one.
        reason: what happened, as a clause about it: ``was killed by SIGKILL``.
    """

    code = "rank_failed"

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(f"rank {rank} {reason}")
