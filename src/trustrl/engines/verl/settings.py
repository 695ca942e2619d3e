"""Start-up check of verl's configuration against the region, by the rows of `trustrl.engines.verl_refusals`."""

import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from verl.utils import config as verl_config

from trustrl.config.axes import Region
from trustrl.engines import seam
from trustrl.engines.naming import is_ours
from trustrl.engines.refusals import check, reader
from trustrl.engines.roles import by_trainer
from trustrl.engines.step_check import warn_if_it_cannot_act
from trustrl.engines.verl.region import recording_of, region_of
from trustrl.engines.verl_refusals import ACTOR, LOSS, ROWS, WHOLE_VOCABULARY, settings_needed


def check_settings(config: Mapping[str, Any]) -> Region:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Args:
        config: verl's whole configuration, as `main_ppo` gets it.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: with the setting and what to do.
    """
    given = reader(config)
    policy_loss = given(LOSS, {})
    region = region_of(policy_loss.get("loss_mode"), policy_loss)
    recording_of(policy_loss)
    check(ROWS, given, region)
    epochs, mini_batch = given(f"{ACTOR}.ppo_epochs", 1), given(f"{ACTOR}.ppo_mini_batch_size", 1)
    if by_trainer(region.needs(), "sampler"):
        warn_if_it_cannot_act(
            region,
            updates_per_batch=epochs * given("data.train_batch_size", mini_batch) / mini_batch,
            remedy=f"Set {ACTOR}.ppo_mini_batch_size below data.train_batch_size or {ACTOR}.ppo_epochs above 1, or "
            "anchor the region on the sampler with region.anchor=behavior.",
        )
    return region


def fill_in(config: Any) -> dict[str, Any]:
    """Sets what the region needs and the user left at verl's defaults; returns what it set.

    Args:
        config: verl's whole configuration; changed in place.
    """
    given = reader(config)
    policy_loss = given(LOSS, {})
    if not is_ours(policy_loss.get("loss_mode", "")):
        return {}
    wanted = settings_needed(given, region_of(policy_loss.get("loss_mode"), policy_loss))
    for path, value in wanted.items():
        OmegaConf.update(config, path, value, force_add=True)
    return wanted


def check_engine(region: Region, *, strategy: str, sequence_parallel: int, fused_kernels: bool) -> None:
    """Refuses engines in which the last hidden states and the output layer cannot be reached as a whole.

    Raises:
        ConfigError: with what to set.
    """
    actor = {"strategy": strategy, "ulysses_sequence_parallel_size": sequence_parallel}
    model = {"use_fused_kernels": fused_kernels}
    check(WHOLE_VOCABULARY, reader({ACTOR.split(".")[0]: {"actor": actor, "model": model}}), region)


def install_check() -> None:
    """Makes verl's own `validate_config` check the region's settings too.

    verl's drivers call it before they start Ray. So a run that was not started by `python -m trustrl.engines.verl` is
    refused at its start as well, if the driver loads this package (`VERL_USE_EXTERNAL_MODULES`).

    Raises:
        EngineError: verl validates its configuration in another way than this adapter knows.
    """
    theirs = verl_config.validate_config
    seam.require_parameters(verl_config, "validate_config", ("config", "use_reference_policy", "use_critic"))

    @functools.wraps(theirs)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        if is_ours(reader(config)(f"{LOSS}.loss_mode", "")):
            check_settings(config)
        theirs(config, *args, **kwargs)

    verl_config.validate_config = validate_config
