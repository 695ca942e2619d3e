"""SkyRL's configuration: the region that it chooses, and checks of its settings against that region.

The rows of `trustrl.engines.refusals.skyrl` describe the refused settings.
"""

from dataclasses import dataclass
from typing import Any

from skyrl.train.config import AlgorithmConfig

from trustrl.config.axes import Region
from trustrl.core.metrics import check_choice
from trustrl.engines.common.region_needs import by_trainer
from trustrl.engines.common.region_settings import SettingNames, region_named
from trustrl.engines.common.step_check import warn_if_it_cannot_act
from trustrl.engines.refusals.rows import check, reader
from trustrl.engines.refusals.skyrl import ALGORITHM_ROWS, ROWS


@dataclass
class RegionAlgorithmConfig(AlgorithmConfig):
    """SkyRL's `trainer.algorithm` with fields for a region's settings: `trainer.algorithm.region.max_ratio=5`.

    SkyRL's configuration is typed, so new keys need a new type; `python -m trustrl.engines.skyrl` uses this one.
    """

    region: dict[str, Any] | None = None
    """Settings in the form that `trustrl.config_from_dict` reads. With a preset's name: only the settings that differ
    from the preset. One bound sets both if the preset's two bounds are equal."""

    on_nonfinite: str = "drop"
    """See `trustrl.policy_loss`."""

    metrics: str = "core"
    """The metrics to log: "core" for a few, "all" for every one that SkyRL can average. See `trustrl metrics`."""


SETTING_NAMES = SettingNames(
    name="trainer.algorithm.policy_loss_type",
    region="trainer.algorithm.region",
    how=f"Start SkyRL with `python -m {__package__}` and add trainer.algorithm.region.kind=...",
)


def region_of(policy_loss_type: str, algorithm: Any) -> Region:
    """Returns the region that SkyRL's `trainer.algorithm` chooses.

    Args:
        policy_loss_type: `trustrl-<preset>`, or `trustrl` for a region described in full.
        algorithm: A `RegionAlgorithmConfig`, or SkyRL's own type, which has only the name.

    Raises:
        ConfigError: If the name is not a trustrl name, or the settings do not fit the preset.
        UnknownNameError: If a `kind` is not registered.
    """
    return region_named(policy_loss_type, getattr(algorithm, "region", None), SETTING_NAMES)


def check_settings(config: Any) -> Region:
    """Raises if a setting bypasses the region, counts the mismatch twice, or makes a ratio of unlike log-probs.

    Args:
        config: SkyRL's whole configuration, a `SkyRLTrainConfig`.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    algorithm = config.trainer.algorithm
    region = region_of(algorithm.policy_loss_type, algorithm)
    check_choice(getattr(algorithm, "metrics", "core"), "trainer.algorithm.metrics")
    check(ROWS, reader(config), region)
    if by_trainer(region.needs(), "sampler"):
        trainer = config.trainer
        mini_batches = trainer.train_batch_size / trainer.policy_mini_batch_size
        warn_if_it_cannot_act(
            region,
            updates_per_batch=trainer.update_epochs_per_batch * mini_batches,
            remedy="Set trainer.policy_mini_batch_size below trainer.train_batch_size or "
            "trainer.update_epochs_per_batch above 1, or anchor the region on the sampler with region.anchor=behavior.",
        )
    return region


def check_algorithm(algorithm: Any, region: Region) -> None:
    """Checks only `trainer.algorithm`, the part of the configuration that SkyRL passes to a loss.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    check(ALGORITHM_ROWS, reader({"trainer": {"algorithm": algorithm}}), region)
