"""Which region a policy loss runs with: the preset in its name, and what verl's own configuration says beside it."""

from dataclasses import dataclass
from typing import Any

from verl.workers.config import PolicyLossConfig

from trustrl.config.axes import Region
from trustrl.engines.naming import Settings, more_than_sampled_tokens, region_named
from trustrl.engines.step_check import MAX_DROPPED_SHARE
from trustrl.errors import ConfigError
from trustrl.recording import Recording


@dataclass
class RegionLossConfig(PolicyLossConfig):
    """verl's `policy_loss` with room for a region's settings.

    verl's configuration is typed, so new keys need a new type::

        actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig
        +actor_rollout_ref.actor.policy_loss.region.divergence.max_increase=0.2
    """

    region: dict[str, Any] | None = None
    """Settings as `trustrl.config_from_dict` reads them. Beside a preset's name: only what differs from the preset. One
    bound given sets both where the preset's two are equal."""

    on_nonfinite: str = "drop"
    """See `trustrl.policy_loss`."""

    max_dropped_share: float = MAX_DROPPED_SHARE
    """Largest share of a step's tokens that may be dropped for faults; above it the step raises. 1 never raises."""

    startup_checks: bool = True
    """Whether the ratio must be 1 before the first step."""

    recording: dict[str, Any] | None = None
    """Which tokens to write to disk, as `trustrl.recording.Recording.of` reads it; None writes nothing."""


SETTINGS = Settings(
    name="policy_loss.loss_mode",
    region="policy_loss.region",
    how=f"Set policy_loss._target_ to {__package__}.{RegionLossConfig.__name__} and add region.kind=...",
)


def region_of(loss_mode: str, policy_loss: Any) -> Region:
    """The region that verl's `policy_loss` asks for.

    Args:
        loss_mode: `trustrl-<preset>`, or `trustrl` for a region described in full.
        policy_loss: A `PolicyLossConfig`, or the mapping it is made from.

    Raises:
        ConfigError: it is none of ours, or its settings do not fit the preset.
        UnknownNameError: a `kind` nobody registered.
    """
    return region_named(loss_mode, policy_loss.get("region", None), SETTINGS)


def recording_of(policy_loss: Any) -> Recording | None:
    """What verl's `policy_loss` asks to record.

    Raises:
        ConfigError: its settings do not fit.
        UnknownNameError: a trigger nobody registered.
    """
    given = policy_loss.get("recording", None)
    return None if given is None else Recording.of(given)


def refuse_more_than_sampled_tokens(region: Region) -> None:
    """Refuses what verl's registry alone cannot feed: it hands a loss two log-probs of the sampled token.

    Raises:
        ConfigError: with what the region needs.
    """
    wanted = more_than_sampled_tokens(region)
    if len(region.needs().anchors) > 1:
        wanted.append("the log-probs of sampler and trainer")
    if wanted:
        raise ConfigError(
            f"region must be decided by the sampled token and one anchor outside trustrl's workers, got {region.kind}, "
            f"which needs {' and '.join(wanted)} at each position. Let verl's workers load {__package__} "
            f"(VERL_USE_EXTERNAL_MODULES={__package__}), which makes {__package__}.worker.RegionWorker their actor."
        )
