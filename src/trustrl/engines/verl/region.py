"""Which region a policy loss runs with: the preset in its name, and what verl's own configuration says beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.workers.config import PolicyLossConfig

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict, config_to_dict
from trustrl.config.presets import preset, presets
from trustrl.errors import ConfigError
from trustrl.recording import Recording
from trustrl.registry import nearest

PREFIX = "trustrl"
"""`trustrl-<preset>` is that preset; `trustrl` alone is the region that `policy_loss.region` describes in full."""


@dataclass
class RegionLossConfig(PolicyLossConfig):
    """verl's `policy_loss` with room for a region's settings.

    verl's configuration is typed, so new keys need a new type::

        actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig
        +actor_rollout_ref.actor.policy_loss.region.divergence.max_increase=0.2
    """

    region: dict[str, Any] | None = None
    """Settings as `trustrl.config_from_dict` reads them. Beside a preset's name: only what differs from the preset."""

    on_nonfinite: str = "drop"
    """See `trustrl.policy_loss`."""

    startup_checks: bool = True
    """Whether the ratio must be 1 before the first step."""

    recording: dict[str, Any] | None = None
    """Which tokens to write to disk, as `trustrl.recording.Recording.of` reads it; None writes nothing."""


def names() -> list[str]:
    """Every `loss_mode` of ours: `trustrl`, and one for each preset."""
    return [PREFIX, *(f"{PREFIX}-{name}" for name in presets())]


def region_of(loss_mode: str, policy_loss: Any) -> Region:
    """The region that verl's `policy_loss` asks for.

    Args:
        loss_mode: `trustrl-<preset>`, or `trustrl` for a region described in full.
        policy_loss: A `PolicyLossConfig`, or the mapping it is made from.

    Raises:
        ConfigError: it is none of ours, or its settings do not fit the preset.
        UnknownNameError: a `kind` nobody registered.
    """
    name = loss_mode.removeprefix(f"{PREFIX}-")
    whole = loss_mode == PREFIX
    if not whole and (name == loss_mode or name not in presets()):
        known = names()
        hint = f" Did you mean '{PREFIX}-{name}'?" if f"{PREFIX}-{name}" in known else nearest(loss_mode, known)
        raise ConfigError(
            f"policy_loss.loss_mode must be a region's name, got {loss_mode!r}.{hint} Known: {', '.join(known)}."
        )
    given = policy_loss.get("region", None)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"policy_loss.region must be a dictionary of settings, got {given!r}.")
    if whole:
        if not given:
            raise ConfigError(
                f"policy_loss.region must describe the region with loss_mode={PREFIX!r}, got {given!r}. "
                f"Set policy_loss._target_ to {__package__}.{RegionLossConfig.__name__} and add region.kind=..., "
                f"or name a preset: loss_mode={PREFIX}-dppo-binary-tv."
            )
        region = config_from_dict(given)
    else:
        region = preset(name)
        if given:
            region = config_from_dict(_laid_over(config_to_dict(region), given, "policy_loss.region", loss_mode))
    if not isinstance(region, Region):
        raise ConfigError(f"policy_loss.region must describe a region, got {region!r}.")
    return region


def recording_of(policy_loss: Any) -> Recording | None:
    """What verl's `policy_loss` asks to record.

    Raises:
        ConfigError: its settings do not fit.
        UnknownNameError: a trigger nobody registered.
    """
    given = policy_loss.get("recording", None)
    return None if given is None else Recording.of(given)


def _laid_over(base: Mapping[str, Any], given: Mapping[str, Any], where: str, loss_mode: str) -> dict[str, Any]:
    """A preset's settings with some replaced; what they are of may not change, or the name would lie."""
    merged = dict(base)
    for key, value in given.items():
        before = base.get(key)
        if key == "kind" and value != before:
            raise ConfigError(
                f"{where}.kind must be {before!r} with loss_mode={loss_mode!r}, got {value!r}. "
                f"Use loss_mode={PREFIX!r}, which takes the whole region from policy_loss.region."
            )
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _laid_over(before, value, f"{where}.{key}", loss_mode)
        merged[key] = value
    return merged


def is_ours(loss_mode: str) -> bool:
    """Whether verl's `loss_mode` names a region."""
    return loss_mode == PREFIX or loss_mode.startswith(f"{PREFIX}-")


def refuse_more_than_sampled_tokens(region: Region) -> None:
    """Refuses what verl's registry alone cannot feed: it hands a loss two log-probs of the sampled token.

    Raises:
        ConfigError: with what the region needs.
    """
    needs = region.needs()
    more = {
        f"the {needs.topk} most probable ids": needs.topk,
        "the whole vocabulary": needs.full,
        "the log-probs of sampler and trainer": len(needs.anchors) > 1,
    }
    wanted = [what for what, needed in more.items() if needed]
    if wanted:
        raise ConfigError(
            f"region must be decided by the sampled token and one anchor outside trustrl's workers, got {region.kind}, "
            f"which needs {' and '.join(wanted)} at each position. Let verl's workers load {__package__} "
            f"(VERL_USE_EXTERNAL_MODULES={__package__}), which makes {__package__}.worker.RegionWorker their actor."
        )
