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
        "auto multiplies Q4_0, Q4_1 and Q8_0 weights packed on the CPU; off dequantises them to the model's dtype at "
        "load (exact, slower, more memory).",
        choices=("auto", "off"),
    )
