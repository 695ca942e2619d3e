"""Start-up check of SkyRL's configuration against the region, by the rows of `trustrl.engines.skyrl_refusals`."""

from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.refusals import check, reader
from trustrl.engines.roles import by_trainer
from trustrl.engines.skyrl.region import region_of
from trustrl.engines.skyrl_refusals import ALGORITHM_ROWS, ROWS
from trustrl.engines.step_check import warn_if_it_cannot_act


def check_settings(config: Any) -> Region:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Args:
        config: SkyRL's whole configuration, a `SkyRLTrainConfig`.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: with the setting and what to do.
    """
    algorithm = config.trainer.algorithm
    region = region_of(algorithm.policy_loss_type, algorithm)
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
    """Checks `trainer.algorithm` alone, which is all that SkyRL gives a loss.

    Raises:
        ConfigError: with the setting and what to do.
    """
    check(ALGORITHM_ROWS, reader({"trainer": {"algorithm": algorithm}}), region)
