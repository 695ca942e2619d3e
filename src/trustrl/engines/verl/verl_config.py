"""verl's configuration: the region that it chooses, and checks of its settings against that region.

The rows of `trustrl.engines.refusals.verl` describe the refused settings.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from verl.utils import config as config_utils
from verl.workers.config import PolicyLossConfig

from trustrl.config.axes import Region
from trustrl.core.metrics import Choice, check_choice
from trustrl.engines.common import seam
from trustrl.engines.common.region_needs import by_trainer, more_than_sampled_tokens
from trustrl.engines.common.region_settings import SettingNames, is_region_name, region_named
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE, warn_if_it_cannot_act
from trustrl.engines.refusals.rows import check, reader
from trustrl.engines.refusals.verl import ENGINE, ROWS
from trustrl.engines.refusals.verl_settings import ACTOR, LOSS, settings_needed
from trustrl.errors import ConfigError
from trustrl.recording import Recording


@dataclass
class RegionLossConfig(PolicyLossConfig):
    """verl's `policy_loss` with fields for a region's settings.

    verl's configuration is typed, so new keys need a new type::

        actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig
        +actor_rollout_ref.actor.policy_loss.region.divergence.max_increase=0.2
    """

    region: dict[str, Any] | None = None
    """Settings in the form that `trustrl.config_from_dict` reads. With a preset's name: only the settings that differ
    from the preset. One bound sets both if the preset's two bounds are equal."""

    on_nonfinite: str = "drop"
    """See `trustrl.policy_loss`."""

    max_dropped_share: float = MAX_DROPPED_SHARE
    """Largest share of a step's tokens that may be dropped for faults; above it the step raises. 1 never raises."""

    metrics: str = "core"
    """The metrics to log: "core" for about eight, "all" for every one. See `trustrl metrics`."""

    startup_checks: bool = True
    """True to raise if the ratio is not 1 before the first step."""

    max_kept: int | None = None
    """Largest number of ids that top-p or top-k may keep at a token; more are an error. None if tokens are drawn from
    the whole vocabulary. `python -m trustrl.engines.verl` sets it for truncated sampling."""

    on_stale_replica: str = "warn"
    """Response to a replica of the sampler that does not follow the trainer's weights: "warn", "raise" or "ignore"."""

    recording: dict[str, Any] | None = None
    """The tokens to write to disk, in the form that `trustrl.recording.Recording.of` reads; None writes nothing."""


SETTING_NAMES = SettingNames(
    name="policy_loss.loss_mode",
    region="policy_loss.region",
    how=f"Set policy_loss._target_ to {__package__}.{RegionLossConfig.__name__} and add region.kind=...",
)


def region_of(loss_mode: str, policy_loss: Any) -> Region:
    """Returns the region that verl's `policy_loss` chooses.

    Args:
        loss_mode: `trustrl-<preset>`, or `trustrl` for a region described in full.
        policy_loss: A `PolicyLossConfig`, or the mapping that it is made from.

    Raises:
        ConfigError: If the name is not a trustrl name, or the settings do not fit the preset.
        UnknownNameError: If a `kind` is not registered.
    """
    return region_named(loss_mode, policy_loss.get("region", None), SETTING_NAMES)


def metrics_of(policy_loss: Any) -> Choice:
    """Returns the metrics that verl's `policy_loss` asks to log.

    Raises:
        ConfigError: If they are neither "core" nor "all".
    """
    metrics = policy_loss.get("metrics", "core")
    check_choice(metrics, "policy_loss.metrics")
    return metrics


def recording_of(policy_loss: Any) -> Recording | None:
    """Returns the recording that verl's `policy_loss` requests, or None.

    Raises:
        ConfigError: If its settings are invalid, or ask for routed experts.
        UnknownNameError: If a trigger is not registered.
    """
    settings = policy_loss.get("recording", None)
    if settings is None:
        return None
    recording = Recording.of(settings)
    if recording.experts:
        raise ConfigError(
            "policy_loss.recording.experts must be False on verl, got True. verl carries routed experts to Megatron "
            "workers for its own router replay, and trustrl does not read them there. TRL records them."
        )
    return recording


def refuse_more_than_sampled_tokens(region: Region) -> None:
    """Raises if the region needs more than verl passes to a registered loss: two log-probs of the sampled token.

    Raises:
        ConfigError: If the region needs more; names it.
    """
    wanted = more_than_sampled_tokens(region)
    if len(region.needs().anchors) > 1:
        wanted.append("the log-probs of sampler and trainer")
    if wanted:
        raise ConfigError(
            "Outside trustrl's workers, region must read only the sampled token and one anchor, got "
            f"{region.kind}, which needs {' and '.join(wanted)} at each position. Set "
            f"VERL_USE_EXTERNAL_MODULES={__package__}, so that verl's workers load {__package__} and use "
            f"{__package__}.worker.RegionWorker as their actor."
        )


def check_settings(config: Mapping[str, Any]) -> Region:
    """Raises if a setting bypasses the region, counts the mismatch twice, or makes a ratio of unlike log-probs.

    Args:
        config: verl's whole configuration, as passed to `main_ppo`.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    setting = reader(config)
    policy_loss = setting(LOSS, {})
    region = region_of(policy_loss.get("loss_mode"), policy_loss)
    recording_of(policy_loss)
    metrics_of(policy_loss)
    check(ROWS, setting, region)
    epochs, mini_batch = setting(f"{ACTOR}.ppo_epochs", 1), setting(f"{ACTOR}.ppo_mini_batch_size", 1)
    if by_trainer(region.needs(), "sampler"):
        warn_if_it_cannot_act(
            region,
            updates_per_batch=epochs * setting("data.train_batch_size", mini_batch) / mini_batch,
            remedy=f"Set {ACTOR}.ppo_mini_batch_size below data.train_batch_size or {ACTOR}.ppo_epochs above 1, or "
            "anchor the region on the sampler with region.anchor=behavior.",
        )
    return region


def fill_in(config: Any) -> dict[str, Any]:
    """Sets the settings that the region needs and that still have verl's defaults.

    Args:
        config: verl's whole configuration; changed in place.

    Returns:
        The settings that were set, with their values.
    """
    setting = reader(config)
    policy_loss = setting(LOSS, {})
    if not is_region_name(policy_loss.get("loss_mode", "")):
        return {}
    wanted = settings_needed(setting, region_of(policy_loss.get("loss_mode"), policy_loss))
    for path, value in wanted.items():
        OmegaConf.update(config, path, value, force_add=True)
    return wanted


def check_engine(region: Region, policy_loss: Any, engine: Any, model: Any) -> None:
    """Raises if a worker's engine does not work with the region.

    Args:
        region: The region.
        policy_loss: verl's `PolicyLossConfig`.
        engine: verl's `EngineConfig`.
        model: verl's `HFModelConfig`.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    actor = {"strategy": engine.strategy, "policy_loss": policy_loss, "megatron": engine}
    model_settings = {"use_fused_kernels": engine.use_fused_kernels, "mtp": getattr(model, "mtp", None)}
    model_settings["lora"] = getattr(model, "lora", None)
    check(ENGINE, reader({ACTOR.split(".")[0]: {"actor": actor, "model": model_settings}}), region)


def install_check() -> None:
    """Adds the check of the region's settings to verl's own `validate_config`.

    verl's drivers call `validate_config` before they start Ray. So a run that was not started with
    `python -m trustrl.engines.verl` is checked at its start too, if the driver loads this package
    (`VERL_USE_EXTERNAL_MODULES`).

    Raises:
        EngineError: If verl validates its configuration in a way that this adapter does not support.
    """
    theirs = config_utils.validate_config
    seam.require_parameters(config_utils, "validate_config", ("config", "use_reference_policy", "use_critic"))

    @functools.wraps(theirs)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        if is_region_name(reader(config)(f"{LOSS}.loss_mode", "")):
            check_settings(config)
        theirs(config, *args, **kwargs)

    config_utils.validate_config = validate_config
