"""Settings of a region in ms-swift: environment variables, which ms-swift's YAML files set under `ENV`."""

import os
from typing import NamedTuple, cast

from trustrl.config.axes import Region
from trustrl.config.validators import one_of
from trustrl.core.metrics import Choice, check_choice
from trustrl.engines.common.region_needs import Behavior
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE
from trustrl.errors import ConfigError

REGION, BEHAVIOR, METRICS = "TRUSTRL_REGION", "TRUSTRL_BEHAVIOR", "TRUSTRL_METRICS"
STARTUP_CHECKS, DROPPED = "TRUSTRL_STARTUP_CHECKS", "TRUSTRL_MAX_DROPPED_SHARE"


class Settings(NamedTuple):
    """The settings of one run."""

    region: Region
    behavior: Behavior = "sampler"
    """The source of μ: the log-probs that vLLM recorded, or, if transformers generates, those of the trainer."""

    metrics: Choice = "core"
    startup_checks: bool = True
    max_dropped_share: float = MAX_DROPPED_SHARE


def settings() -> Settings:
    """Returns the settings that the environment describes.

    Raises:
        ConfigError: If a variable is missing or invalid.
        UnknownNameError: If no preset has the name in `TRUSTRL_REGION`.
    """
    variables = os.environ
    if not variables.get(REGION):
        raise ConfigError(
            f"{REGION} must be set with `import trustrl.engines.swift`, got nothing. Set it to a preset's name, such "
            "as dppo-binary-tv, in the environment or under ENV in ms-swift's YAML file."
        )
    behavior, metrics = variables.get(BEHAVIOR) or "sampler", variables.get(METRICS) or "core"
    one_of(BEHAVIOR, behavior, ("sampler", "trainer"))
    check_choice(metrics, METRICS)
    checks = variables.get(STARTUP_CHECKS) or "on"
    one_of(STARTUP_CHECKS, checks, ("on", "off"))
    share = variables.get(DROPPED) or str(MAX_DROPPED_SHARE)
    try:
        number = float(share)
    except ValueError:
        raise ConfigError(f"{DROPPED} must be a share in (0, 1], got {share!r}.") from None
    return Settings(
        region_given(variables[REGION], REGION), cast(Behavior, behavior), cast(Choice, metrics), checks == "on", number
    )
