"""Numbers that are none."""

import pytest

from arbi_core.config.load import from_values
from arbi_core.errors import ConfigError


@pytest.mark.parametrize("value", ["nan", "inf", float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cache.host_tier_gib", "scheduler.rank_timeout_s", "scheduler.default_timeout_s"])
def test_settings_take_finite_numbers_only(name, value):
    with pytest.raises(ConfigError, match=rf"{name}.*no usable number"):
        from_values({name: value})
