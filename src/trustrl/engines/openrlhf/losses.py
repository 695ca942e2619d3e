"""A region with the call and the return of OpenRLHF's policy loss.

Seam:     `ActorPPOTrainer` in `openrlhf.trainer.ray.ppo_actor`, replaced by a subclass with another `actor_loss_fn`
Switch:   `python -m trustrl.engines.openrlhf --trustrl.region dppo-binary-tv-capped`, or the variable TRUSTRL_REGION
Borrowed: `aggregate_loss`, whose derivative is the factor on each token
Carried:  by Ray's `worker_process_setup_hook`, which replaces the trainer in each worker that imports it
"""

from typing import NamedTuple

import torch
from openrlhf.models import loss as openrlhf_loss
from torch import Tensor, nn

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.core.diagnostics import Sums
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_sums import averages
from trustrl.engines.refusals.openrlhf import REDUCTIONS

OLDEST = (0, 11, 2)
CALLED_WITH = (
    "self", "log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs", "dp_size",
    "batch_num_tokens", "global_batch_size",
)  # fmt: skip
REDUCED_WITH = ("loss", "loss_mask", "token_level_loss", "dp_size", "batch_num_tokens", "global_batch_size")

SAMPLED = SampledLoss(
    "OpenRLHF",
    {
        "behavior": ("rollout_log_probs", "Set --algo.advantage.is_correction_level token."),
        "proximal": ("old_log_probs", "OpenRLHF's experience maker computes them before the update."),
    },
)


class Versions(NamedTuple):
    """Numbers of weight updates."""

    policy: int
    """Before the running step."""

    tokens: Tensor
    """(rows, tokens): before each token was sampled."""


class RegionLoss(nn.Module):
    """Policy loss of a region. Returns (loss, clip ratio, PPO's KL, vLLM's KL, filtered share) as `PolicyLoss` does.

    Args:
        region: The region.
        loss_agg_mode: OpenRLHF's `--actor.loss_agg_mode`.

    Raises:
        ConfigError: If OpenRLHF cannot feed the region.
        EngineError: If OpenRLHF is too old, or calls or reduces its loss in a way that this adapter does not support.
    """

    def __init__(self, region: Region, loss_agg_mode: str = "token-mean") -> None:
        super().__init__()
        seam.require_version("openrlhf", OLDEST, "trustrl was not tested with older versions")
        seam.require_parameters(openrlhf_loss.PolicyLoss, "forward", CALLED_WITH)
        seam.require_parameters(openrlhf_loss, "aggregate_loss", REDUCED_WITH)
        self.region = region
        self.loss_agg_mode = loss_agg_mode
        self.sums: Sums | None = None
        """The sums of the last call."""

        self.versions: Versions | None = None
        """Those of the running step; None if the sampler did not record them."""

        self._check()

    def extra_repr(self) -> str:
        """Returns the settings that `print` shows."""
        return f"{self.region!r}, loss_agg_mode={self.loss_agg_mode!r}"

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns the loss of one micro-batch, and four numbers that OpenRLHF logs.

        Args:
            log_probs: The policy's log-probs, (rows, tokens), with gradient.
            old_log_probs: The log-probs of π', which the trainer computed before the update.
            advantages: The advantage of each token.
            action_mask: 1 on tokens in the loss; None for all tokens.
            rollout_log_probs: The log-probs of μ, which vLLM recorded.
            dp_size: See OpenRLHF's `aggregate_loss`, as for the next two.
            batch_num_tokens: Tokens of the whole optimizer step.
            global_batch_size: Sequences of the whole optimizer step.

        Returns:
            The loss; masked tokens / tokens in the loss; the mean of log π' − log π; the mean of log μ − log π' and the
            share of tokens that the region's correction drops, both None without μ.

        Raises:
            MissingDataError: If the region's anchor is missing.
        """
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        in_loss = mask.bool()
        weights = token_weights(
            lambda loss: openrlhf_loss.aggregate_loss(
                loss,
                mask,
                token_level_loss=self.loss_agg_mode == "token-mean",
                dp_size=dp_size,
                batch_num_tokens=batch_num_tokens,
                global_batch_size=global_batch_size,
            ),
            log_probs.detach(),
        )
        log_probs, old_log_probs = self._compared(log_probs, old_log_probs)
        rollout = RolloutTokens(
            behavior_logp=rollout_log_probs,
            proximal_logp=old_log_probs,
            advantage=advantages,
            in_loss=in_loss,
            version=None if self.versions is None else self.versions.tokens,
        )
        out = self._region_loss(log_probs, rollout, TokenWeights(weights, like=REDUCTIONS.get(self.loss_agg_mode)))
        self.sums = out.sums
        added = out.sums.added
        tokens = added["tokens"].clamp(min=1)
        masked = (added["masked"] / tokens).float()
        ppo_kl = _mean(old_log_probs - log_probs.detach(), in_loss)
        if rollout_log_probs is None:
            return out.loss, masked, ppo_kl, None, None
        dropped = added.get("extra/correction_zero", torch.zeros_like(added["tokens"]))
        return out.loss, masked, ppo_kl, _mean(rollout_log_probs - old_log_probs, in_loss), (dropped / tokens).float()

    def _check(self) -> None:
        SAMPLED.check(self.region)

    def _compared(self, log_probs: Tensor, old_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log π and log π' of the same distribution as log μ."""
        return log_probs, old_log_probs

    def _region_loss(self, log_probs: Tensor, rollout: RolloutTokens, reduction: TokenWeights) -> LossOutput:
        """Returns the region's loss of (rows, tokens)."""
        return SAMPLED(log_probs, rollout, self.region, reduction, version=self._updates())

    def _updates(self) -> int | None:
        return None if self.versions is None else self.versions.policy

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last call, which OpenRLHF averages over tokens."""
        return {} if self.sums is None else averages(self.sums, "core")


def _mean(x: Tensor, in_loss: Tensor) -> Tensor:
    return torch.where(in_loss, x, 0.0).sum() / in_loss.sum().clamp(min=1)
