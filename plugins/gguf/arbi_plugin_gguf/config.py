"""Settings of this plugin, ``[plugins.gguf]``."""

from __future__ import annotations

from attrs import frozen

from arbi_core.api import option

__all__ = ["GgufConfig"]


@frozen(kw_only=True)
class GgufConfig:
    """How GGUF weights are held."""

    SECTION = "plugins.gguf"

    packed: str = option(
        "auto",
        "auto multiplies quantised weights on the CPU as 4-bit codes and in half precision; off dequantises them to "
        "float32 at load (exact, slower, more memory).",
        choices=("auto", "off"),
    )
