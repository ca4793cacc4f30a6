"""What this plugin offers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arbi_core.api import hookimpl
from arbi_plugin_tkv.backend import offered
from arbi_plugin_tkv.calibration.capture import CAPTURE
from arbi_plugin_tkv.calibration.command import add_command
from arbi_plugin_tkv.config import TkvConfig

if TYPE_CHECKING:
    from arbi_core.api import AttentionBackend

arbi_api_version = 1


@hookimpl
def arbi_attention_backends() -> list[AttentionBackend]:
    """Offer the compressed and the raw paged caches."""
    return [*offered(), CAPTURE]


@hookimpl
def arbi_config_sections() -> dict[str, type]:
    """Offer the settings under ``[plugins.tkv]``."""
    return {"tkv": TkvConfig}


@hookimpl
def arbi_commands(subparsers: Any) -> None:
    """Offer ``arbi calibrate``."""
    add_command(subparsers)
