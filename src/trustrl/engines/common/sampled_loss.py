"""A region as a loss of sampled log-probs, for trainers that pass a loss nothing else of the vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.config.terms import TokenWeights
from trustrl.core.clean import OnNonFinite
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.region_needs import more_than_sampled_tokens
from trustrl.errors import ConfigError, MissingDataError


@dataclass(frozen=True)
class SampledLoss:
    """The place where one engine calls a loss with log-probs of sampled tokens."""

    engine: str
    """The engine's name, for errors."""

    anchors: Mapping[Anchor, tuple[str, str]]
    """For each anchor that the engine can pass: its name there, and a sentence on how to record it."""

    def check(self, region: Region) -> None:
        """Raises if the engine cannot feed the region."""
        more = more_than_sampled_tokens(region)
        if more:
            raise ConfigError(
                f"The region must read only sampled tokens in {self.engine}, got {region.kind}, which needs "
                f"{' and '.join(more)} at each position. TRL and verl support it."
            )
        for anchor in sorted(region.needs().anchors - self.anchors.keys()):
            raise ConfigError(
                f"The region must not read the {anchor} log-probs in {self.engine}, got {region.kind}, which does. "
                f"{self.engine} passes only {', '.join(sorted(self.anchors))} log-probs to a loss."
            )

    def __call__(
        self,
        logp: Tensor,
        rollout: RolloutTokens,
        region: Region,
        reduction: TokenWeights,
        on_nonfinite: OnNonFinite = "drop",
        version: int | None = None,
    ) -> LossOutput:
        """Returns the loss of one micro-batch.

        Args:
            logp: The policy's log-probs, with gradient.
            rollout: The rollout's side, with the same shape.
            region: The region.
            reduction: The factor by which the engine multiplies each token's loss; see `token_weights`. Its `like`
                names the kind of average, which regions that are defined per sequence check.
            on_nonfinite: See `trustrl.policy_loss`.
            version: The version of the weights being trained, if `rollout` has versions.

        Raises:
            ConfigError: If the engine cannot feed the region.
            MissingDataError: If an anchor of the region is None; names the engine's setting.
        """
        self.check(region)
        self.require_anchors(rollout, region)
        policy = PolicyTokens(logp=logp, version=version)
        return policy_loss(policy, rollout, region, reduction=reduction, on_nonfinite=on_nonfinite)

    def require_anchors(self, rollout: RolloutTokens, region: Region) -> None:
        """Raises if an anchor of the region is missing."""
        logps = {"behavior": rollout.behavior_logp, "proximal": rollout.proximal_logp}
        for anchor in sorted(region.needs().anchors):
            if logps[anchor] is None:
                argument, advice = self.anchors[anchor]
                raise MissingDataError(f"{argument} must be given with {region.kind}, got None. {advice}")


def token_weights(reduce: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Returns the factor by which a linear reduction multiplies each token's loss: its derivative.

    Args:
        reduce: The engine's own reduction of a tensor of per-token losses to one number.
        like: A tensor with the shape, type, and device of those losses.
    """
    tracked = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        (weights,) = torch.autograd.grad(reduce(tracked), tracked)
    return weights
