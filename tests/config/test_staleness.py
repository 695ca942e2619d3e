"""Settings of stale tokens that mean nothing."""

import pytest

from trustrl import regions
from trustrl.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: regions.DPPO(max_staleness=-1), "dppo.max_staleness must be"),
        (lambda: regions.MiniRL(max_staleness=1.5), "minirl.max_staleness must be"),
        (lambda: regions.PPO(when_stale="tighten"), "ppo.max_staleness must be given with when_stale='tighten'"),
        (lambda: regions.PPO(max_staleness=1, when_stale="mask"), "ppo.when_stale must be"),
    ],
    ids=["negative", "fraction", "no limit", "unknown"],
)
def test_settings_without_a_meaning_raise(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
