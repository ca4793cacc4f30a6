"""Settings of this plugin, ``[plugins.tkv]``. Torch-free."""

from __future__ import annotations

import os

from attrs import frozen

from arbi_core.api import ConfigError, option
from arbi_plugin_tkv.codec.layout import MAX_BITS, MIN_BITS

__all__ = ["BITS_VARIABLE", "CALIBRATION_VARIABLE", "TkvConfig", "calibration_path", "declared_bits"]

BITS_VARIABLE = "TKV_BITS"
CALIBRATION_VARIABLE = "TKV_CALIBRATION_FILE"
DEFAULT_BITS = 4


@frozen(kw_only=True)
class TkvConfig:
    """How keys and values are compressed."""

    SECTION = "plugins.tkv"

    bits: int | None = option(
        None,
        f"Bits a number where the cache dtype is 'tkv'; the environment's {BITS_VARIABLE}, else {DEFAULT_BITS}.",
        low=MIN_BITS,
        high=MAX_BITS,
    )
    calibration: str | None = option(
        None,
        f"Calibration file of the model; the environment's {CALIBRATION_VARIABLE}; none stores in default coordinates.",
        metavar="FILE",
    )


def declared_bits(config: TkvConfig | None) -> int:
    """Bits of the cache dtype ``tkv``: the setting, else the environment, else 4.

    Raises:
        ConfigError: the environment's value is not a whole number of bits that TKV stores.
    """
    if config is not None and config.bits is not None:
        return config.bits
    text = os.environ.get(BITS_VARIABLE)
    if text is None:
        return DEFAULT_BITS
    fix = f"a whole number from {MIN_BITS} to {MAX_BITS}"
    if "." in text:
        raise ConfigError(
            BITS_VARIABLE, f"{text!r} asks for a mix of widths, which needs a calibration file with a budget table", fix
        )
    try:
        bits = int(text)
    except ValueError:
        raise ConfigError(BITS_VARIABLE, f"{text!r} is not a number", fix) from None
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError(BITS_VARIABLE, f"{bits} is not a width that TKV stores", fix)
    return bits


def calibration_path(config: TkvConfig | None) -> str | None:
    """The calibration file: the setting, else the environment, else none."""
    if config is not None and config.calibration is not None:
        return config.calibration
    return os.environ.get(CALIBRATION_VARIABLE) or None
