"""Decisions of a region on tokens that another loss trains on: recorded, without any effect on training."""

from dataclasses import replace

import torch

from trustrl.config.axes import Region
from trustrl.config.presets import preset
from trustrl.config.terms import TokenWeights
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.region_needs import more_than_sampled_tokens
from trustrl.errors import ConfigError


def observable(region: Region | str | None) -> Region | None:
    """Returns a region that can be observed: its settings, or a preset by name.

    Raises:
        ConfigError: If the region reads more than the sampled token, which a stock run does not compute.
        UnknownNameError: If no preset has this name.
    """
    if region is None:
        return None
    found = preset(region) if isinstance(region, str) else region
    if not isinstance(found, Region):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may run unchecked
        raise ConfigError(f"region must be a trustrl region or the name of a preset, got {region!r}.")
    if more := more_than_sampled_tokens(found):
        raise ConfigError(
            f"region must read only the sampled token in a run with the trainer's own loss, got {found.kind}, which "
            f"reads {' and '.join(more)}. Train with the region, or choose one such as 'dppo-binary-tv'."
        )
    return found


@torch.no_grad()
def observe(policy: PolicyTokens, rollout: RolloutTokens, region: Region) -> LossOutput:
    """Returns the decision and the sums of a region. The loss in the result is not an average and has no gradient.

    Raises:
        MissingDataError: If the run does not record the log-probs of the region's anchor.
    """
    weights = TokenWeights(rollout.in_loss.float(), like=region.needs().reduction)
    return policy_loss(replace(policy, logp=policy.logp.detach()), rollout, region, reduction=weights)
