"""Every hook of arbi: the table of contents of what a plugin can do.

A plugin is a module named by an entry point of the group ``arbi``. It states ``arbi_api_version = 1`` and implements
any of these functions, marked with `hookimpl`. Hooks fire at boot, once, in the process that serves; the last three are
notifications. None is ever called per step, per layer or per token.

A hook that raises or returns something of another type than stated makes its whole plugin *broken*: nothing it offers
is used, `arbi plugins` shows why, and ``--strict-plugins`` refuses to boot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arbi_core.backend.base import AttentionBackend
    from arbi_core.engine.messages import RequestRecord
    from arbi_core.loader.base import CheckpointFormat, WeightFormat
    from arbi_core.model.base import ModelFamily
    from arbi_core.offers import (
        AdapterType,
        AudioCodec,
        Drafter,
        ExecutorFactory,
        LogitsProcessor,
        MediaEncoder,
        ReasoningParser,
        Route,
        ToolParser,
    )

PROJECT = "arbi"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def arbi_attention_backends() -> Sequence[AttentionBackend]:  # type: ignore[empty-body]
    """Offer ways to store and read the state of layers; keyed ``kind:name``."""


@hookspec
def arbi_model_families() -> Sequence[ModelFamily]:  # type: ignore[empty-body]
    """Offer model families; keyed by every architecture they list."""


@hookspec
def arbi_checkpoint_formats() -> Sequence[CheckpointFormat]:  # type: ignore[empty-body]
    """Offer readers of checkpoints on disk; keyed by name."""


@hookspec
def arbi_weight_formats() -> Sequence[WeightFormat]:  # type: ignore[empty-body]
    """Offer packed forms of linear weights; asked in ascending ``detection_priority``, ties by name."""


@hookspec
def arbi_adapter_types() -> Sequence[AdapterType]:  # type: ignore[empty-body]
    """Offer kinds of adapters; keyed by name."""


@hookspec
def arbi_drafters() -> Sequence[Drafter]:  # type: ignore[empty-body]
    """Offer speculative drafters; keyed by name."""


@hookspec
def arbi_media_encoders() -> Sequence[MediaEncoder]:  # type: ignore[empty-body]
    """Offer vision and audio towers; keyed by name."""


@hookspec
def arbi_audio_codecs() -> Sequence[AudioCodec]:  # type: ignore[empty-body]
    """Offer speech codecs; keyed by name."""


@hookspec
def arbi_tool_parsers() -> Sequence[ToolParser]:  # type: ignore[empty-body]
    """Offer tool-call parsers; keyed by name."""


@hookspec
def arbi_reasoning_parsers() -> Sequence[ReasoningParser]:  # type: ignore[empty-body]
    """Offer reasoning parsers; keyed by name."""


@hookspec
def arbi_logits_processors() -> Sequence[LogitsProcessor]:  # type: ignore[empty-body]
    """Offer logits processors that requests may name."""


@hookspec
def arbi_config_sections() -> dict[str, type]:  # type: ignore[empty-body]
    """Offer settings: attrs classes by section name; each becomes ``[plugins.<name>]`` of the configuration."""


@hookspec
def arbi_executors() -> Sequence[ExecutorFactory]:  # type: ignore[empty-body]
    """Offer ways to start and reach the ranks; keyed by name."""


@hookspec
def arbi_routes() -> Sequence[Route]:  # type: ignore[empty-body]
    """Offer HTTP routes. A path of the core, or of another plugin, is a conflict."""


@hookspec
def arbi_commands(subparsers: Any) -> None:
    """Add CLI commands to an `argparse` subparsers object; set ``run=function(args) -> exit code`` as default.

    Called for every ``arbi`` command line, so import nothing heavy here.
    """


@hookspec
def arbi_engine_built(engine: Any) -> None:
    """Notification: the engine is ready to take requests. A raise is logged and counted, never fatal."""


@hookspec
def arbi_engine_closing(engine: Any) -> None:
    """Notification: the engine is about to release the device. A raise is logged and counted, never fatal."""


@hookspec
def arbi_request_finished(record: RequestRecord) -> None:
    """Notification: a request ended. Runs on the engine's thread: be quick. A raise is logged and counted."""
