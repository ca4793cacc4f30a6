"""What this plugin offers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.api import hookimpl
from arbi_plugin_gguf.checkpoint import GGUFFormat
from arbi_plugin_gguf.config import GgufConfig
from arbi_plugin_gguf.packed import HalfFormat, PackedInt4Format

if TYPE_CHECKING:
    from arbi_core.api import CheckpointFormat, WeightFormat

arbi_api_version = 1


@hookimpl
def arbi_checkpoint_formats() -> list[CheckpointFormat]:
    """Offer the reader of ``.gguf`` files."""
    return [GGUFFormat()]


@hookimpl
def arbi_weight_formats() -> list[WeightFormat]:
    """Offer linears that stay packed on the CPU."""
    return [PackedInt4Format(), HalfFormat()]


@hookimpl
def arbi_config_sections() -> dict[str, type]:
    """Offer the settings under ``[plugins.gguf]``."""
    return {"gguf": GgufConfig}
