"""Checks during training: the ratio before the first step, dropped tokens, and regions that cannot act."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trustrl.config import validators
from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor
from trustrl.core.diagnostics import Sums, dropped_because
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.region_needs import Behavior, by_trainer
from trustrl.errors import EngineError, NonFiniteError, TrustRLWarning

LARGEST_GAP = {"trainer": 0.02, "sampler": 0.15}
"""Largest mean |log π − log b| in nats at equal weights, by the side that recorded b. `trainer`: one network run twice
in bf16. `sampler`: two implementations of it; 0.04 is usual for a bf16 sampler."""

WARN_SHARE = 0.01
"""Share of dropped tokens above which a run warns once; a healthy step drops none."""

MAX_DROPPED_SHARE = 0.5
"""Default share of dropped tokens above which a step raises."""

ACTS = {"bounded": "trustrl/masked_share", "extra/projected": "trustrl/projected_share"}
"""Sums that only regions with thresholds have, and the metric that is above 0 once such a region has acted."""


def check_initial_ratio(logp: Tensor, anchor_logp: Tensor, mask: Tensor, recorded_by: str, switch: str) -> None:
    """Raises if the anchor differs from the policy while the policy still has the rollout's weights.

    Warns if the trainer rounds the policy's log-probs.

    Args:
        logp: The policy's log-probs.
        anchor_logp: The anchor's log-probs.
        mask: True on tokens that were sampled with these weights.
        recorded_by: The side that recorded the anchor, `trainer` or `sampler`.
        switch: The setting that turns this check off.
    """
    if logp.dtype in (torch.bfloat16, torch.float16):
        step = 8 * torch.finfo(logp.dtype).eps
        warnings.warn(
            f"The trainer's log-probs should be float32, got {logp.dtype}, which rounds a log-prob of -10 to a "
            f"multiple of {step:g}, and the ratio with it. verl computes them in float32 if flash-attn is installed. "
            "Top-K, TROLL and exact regions are not affected.",
            TrustRLWarning,
            stacklevel=3,
        )
    same = mask & anchor_logp.isfinite() & logp.detach().isfinite()
    if not same.any():
        return
    gap = (logp.detach() - anchor_logp)[same].abs()
    if not gap.mean() <= LARGEST_GAP[recorded_by]:
        raise EngineError(
            "The ratio π/b must be 1 before the first step, got a mean |log π − log b| of "
            f"{gap.mean().item():.3g} nats (largest {gap.max().item():.3g}) against the {recorded_by}'s log-probs at "
            "the same weights. Usual causes: weights that did not reach the sampler, a tied output layer that was not "
            "synced, raw instead of processed log-probs, a different temperature, truncated sampling, dropout. "
            f"Set {switch} to train without this check."
        )


def check_first_loss(
    policy: PolicyTokens,
    rollout: RolloutTokens,
    anchor: Anchor,
    behavior: Behavior = "sampler",
    switch: str = "startup_checks=False",
) -> bool:
    """Checks the anchor of tokens that were sampled with the policy's weights, which no step has changed yet.

    Tokens of earlier weights differ from the policy, and should.

    Args:
        policy: The policy's tokens.
        rollout: The rollout's tokens.
        anchor: The region's anchor.
        behavior: The source of μ.
        switch: The setting that turns this check off.

    Returns:
        True if there were such tokens.

    Raises:
        EngineError: If the log-probs differ; names the usual causes.
    """
    logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
    fresh = rollout.in_loss if rollout.version is None else rollout.in_loss & (rollout.version == policy.version)
    if logp is not None:
        recorded_by = "trainer" if anchor == "proximal" or behavior == "trainer" else "sampler"
        check_initial_ratio(policy.logp, logp, fresh, recorded_by, switch)
    return bool(fresh.any())


def check_recorded(logp: Tensor, in_loss: Tensor) -> None:
    """Raises if the sampler recorded NaN at a token in the loss.

    Infinite log-probs are left to `on_nonfinite`: a sampler may round a probability to 0. NaN is never rounding.

    Raises:
        NonFiniteError: If there is a NaN; names the usual causes.
    """
    num_missing = int((logp.isnan() & in_loss).sum())
    if num_missing:
        raise missing_logps(num_missing, int(in_loss.sum()))


def missing_logps(num_missing: int, tokens: int) -> NonFiniteError:
    """Returns the error for tokens whose recorded log-prob is not a number."""
    return NonFiniteError(
        f"The sampler must record a number as the log-prob of every token in the loss, got NaN at {num_missing:,} of "
        f"{tokens:,} tokens. Usual causes: speculative decoding in vLLM's CPU build, logits that overflow in float16, "
        "weights that became NaN, or a rollout_func that returns None. Fix the sampler: trustrl never replaces its "
        "record."
    )


def check_every_token_is_seen(sums: Sums) -> None:
    """Raises if the trainer's loss weights tokens that the region did not see.

    Adapters pack the tokens in the loss when the rollout is recorded. A token that joins later would have no gradient.

    Args:
        sums: The sums of a step on the host, with the number of `weighted` tokens.
    """
    unseen = int(sums.added["weighted"]) - int(sums.added["tokens"])
    if unseen > 0:
        raise EngineError(
            f"completion_mask and tool_mask must not gain tokens after the rollout is recorded, got {unseen} tokens in "
            "the trainer's loss that the region did not see. They would have no gradient. Extend the masks in a "
            "trainer behind the mixin, `class Mine(TrustRegionMixin, MyTrainer)`, whose "
            "_generate_and_score_completions runs before the rollout is recorded."
        )


class StepCheck:
    """Check of every optimizer step's metrics, summed over micro-batches and ranks."""

    def __init__(
        self, region: Region, *, max_dropped_share: Any, setting: str, updates_per_batch: int = 1, warns: bool = True
    ) -> None:
        """Creates a check for one run.

        Args:
            region: The region of the run.
            max_dropped_share: Largest share of dropped tokens that a step may have; 1 never raises.
            setting: The name of that setting in the engine, for errors.
            updates_per_batch: The number of calls of `check` that belong to the first batch.
            warns: Whether this rank warns. Every rank raises.

        Raises:
            ConfigError: If `max_dropped_share` is not a share.
        """
        validators.real(setting, max_dropped_share, rule="a share in (0, 1]", low=0.0, high=1.0)
        self._region = region
        self._max_dropped_share = max_dropped_share
        self._setting = setting
        self._updates_left = updates_per_batch
        self._warns = warns
        self._warned_of_drops = False
        self._acted = False

    def check(self, metrics: Mapping[str, float], sums: Sums) -> None:
        """Checks one step. Warns once about dropped tokens, and once if the region masked nothing in the first batch.

        Args:
            metrics: All rates of the step's sums, from `trustrl.rates`. They are on the host, so this does not wait for
                the device.
            sums: The sums of the step. Only their names are read.
        """
        dropped = metrics.get("trustrl/dropped_share", 0.0)
        if dropped > self._max_dropped_share:
            raise NonFiniteError(
                f"A step must drop at most {self._max_dropped_share:.0%} of its tokens, got {dropped:.0%}: "
                f"{dropped_because(metrics)}. Fix the cause, or raise {self._setting} to train on the remaining tokens."
            )
        if dropped > WARN_SHARE and not self._warned_of_drops:
            self._warned_of_drops = True
            self._warn(
                f"{dropped:.1%} of this step's tokens were dropped: {dropped_because(metrics)}. They stay in the "
                "denominator. The trustrl/fault_ metrics count each kind. Later steps do not repeat this warning."
            )
        acted = [metrics.get(share, 0.0) > 0 for threshold, share in ACTS.items() if threshold in sums.added]
        self._acted = self._acted or any(acted)
        self._updates_left -= 1
        if self._updates_left == 0 and acted and not self._acted:
            self._warn(
                f"{self._region.kind} masked no token in the first batch of updates (largest ratio "
                f"{metrics.get('trustrl/ratio_max', 1.0):.6g}). Small first steps can explain this. If masked_share "
                "stays at 0, the region has no effect. `trustrl calibrate` recommends a threshold from recorded tokens."
            )

    def _warn(self, message: str) -> None:
        if self._warns:
            warnings.warn(message, TrustRLWarning, stacklevel=3)


def warn_if_it_cannot_act(region: Region, *, updates_per_batch: float, remedy: str) -> None:
    """Warns if every ratio will be 1: one update per batch, against the trainer's own log-probs at the same weights.

    Args:
        region: A region whose anchors the trainer records.
        updates_per_batch: The number of optimizer steps that use one batch of rollouts.
        remedy: A sentence with the engine's settings that change this.
    """
    axes = region.axes()
    acts = axes is None or axes.statistic is not None or axes.max_ratio is not None  # a plain policy gradient does not
    if updates_per_batch <= 1 and acts:
        warnings.warn(
            f"{region.kind} cannot act: the trainer records the anchor at the weights of the only update of each "
            f"batch, so every ratio is 1. {remedy}",
            TrustRLWarning,
            stacklevel=3,
        )


def check_of_rollouts(trainer: Any, behavior: Behavior, max_dropped_share: float, setting: str) -> StepCheck:
    """Returns the check of every step of TRL's trainer. Warns if one update per rollout leaves the region idle.

    Args:
        trainer: A `GRPOTrainer`, or one that derives from it, with a `region`.
        behavior: The source of μ.
        max_dropped_share: Largest share of dropped tokens.
        setting: The name of the setting that has this share.
    """
    updates = trainer.args.steps_per_generation * trainer.num_iterations / trainer.args.gradient_accumulation_steps
    main = trainer.accelerator.is_main_process
    if main and by_trainer(trainer.region.needs(), behavior):
        warn_if_it_cannot_act(
            trainer.region,
            updates_per_batch=updates,
            remedy="Set num_iterations above 1 or steps_per_generation above gradient_accumulation_steps, or use vLLM, "
            "whose recorded log-probs differ from the trainer's.",
        )
    return StepCheck(
        trainer.region,
        max_dropped_share=max_dropped_share,
        setting=setting,
        updates_per_batch=max(1, round(updates)),
        warns=main,
    )


def warn_if_micro_batches_do_not_add_up(loss_type: str, weight: float, filled: float) -> None:
    """Warns if the first step's micro-batches, over all ranks, do not add up to one average.

    A gradient is linear in the coefficients of its tokens. Over one step they add up to 1 if the loss is an average
    over tokens, and to the share of sequences with tokens if it is an average over sequences. TRL's `dapo` divides by
    the mean token count of several steps, and `bnpo` by each micro-batch's own count. A step may therefore be off by
    its length or by an empty micro-batch, but not by a factor of 2.

    Args:
        loss_type: The name of the average in TRL and the trainers that derive from it.
        weight: The sum of the coefficients.
        filled: The share of sequences with tokens.
    """
    expected, slack = {"dapo": (1.0, 1.9), "bnpo": (1.0, 1.9), "grpo": (filled, 1.01)}.get(loss_type, (None, 1.0))
    if expected is not None and not expected / slack < weight < expected * slack:
        warnings.warn(
            f"The coefficients of the first step's tokens should add up to {expected:.3g} (loss_type={loss_type!r} is "
            f"an average), got {weight:.3g}. The learning rate is in effect {weight / max(expected, 1e-9):.3g} times "
            "the configured one. Check gradient_accumulation_steps, steps_per_generation, and the number of processes.",
            TrustRLWarning,
            stacklevel=2,
        )
