"""What must hold before the first step, checked where it is cheap to check and expensive to get wrong."""

import warnings
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from trustrl.config.statistics import Anchor
from trustrl.engines import invariants
from trustrl.engines.trl.settings import Behavior
from trustrl.errors import EngineError, TrustRLWarning
from trustrl.records import PolicyTokens, RolloutTokens


def ratio_is_one(policy: PolicyTokens, rollout: RolloutTokens, anchor: Anchor, behavior: Behavior) -> None:
    """Refuses an anchor that is not the policy's own distribution while the weights are still the rollout's.

    Raises:
        EngineError: they differ; names the usual causes.
    """
    logp = rollout.behavior_logp if anchor == "behavior" else rollout.proximal_logp
    if logp is None or rollout.version is None:
        return
    recorded_by = "trainer" if anchor == "proximal" or behavior == "trainer" else "sampler"
    at = rollout.in_loss & (rollout.version == policy.version)
    invariants.ratio_is_one(policy.logp, logp, at, recorded_by, "startup_checks=False")


def micro_batches_add_up(loss_type: str, weight: float, filled: float) -> None:
    """Says so when the first step's micro-batches, over all ranks, do not add up to one average.

    A gradient is linear in the coefficients of its tokens. Over one step they add up to 1 where the loss is an average
    over tokens, and to the share of sequences with tokens where it is one over sequences. TRL's `dapo` divides by the
    mean token count of several steps and `bnpo` by each micro-batch's own, so that a step may be off by its length or
    by an empty micro-batch; a factor of 2 is another matter.
    """
    expected, slack = {"dapo": (1.0, 1.9), "bnpo": (1.0, 1.9), "grpo": (filled, 1.01)}.get(loss_type, (None, 1.0))
    if expected is not None and not expected / slack < weight < expected * slack:
        warnings.warn(
            f"The first step's tokens should be multiplied with {expected:.3g} in all (loss_type={loss_type!r} is an "
            f"average), got {weight:.3g}: the learning rate is in effect {weight / max(expected, 1e-9):.3g} times what "
            "was set. Check gradient_accumulation_steps, steps_per_generation and the number of processes.",
            TrustRLWarning,
            stacklevel=2,
        )


class RegionActs(TrainerCallback):
    """Check after the first step that the region's loss ran at all.

    Args:
        trainer: The trainer.
        hidden_by: The class in front of `TrustRegionMixin` that overrides a loss, if there is one.
    """

    def __init__(self, trainer: Any, hidden_by: type | None) -> None:
        self._trainer = trainer
        self._hidden_by = hidden_by

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: a whole step was trained without the region.
        """
        if self._trainer._num_losses == 0:
            by = "Something" if self._hidden_by is None else self._hidden_by.__name__
            raise EngineError(
                "The region's loss must run in every step, and it never ran. "
                f"{by} overrides `_compute_loss` or `compute_loss` in front of the region: call super() in it, or "
                "write `class Mine(TrustRegionMixin, MyGRPOTrainer)` with the override in MyGRPOTrainer."
            )


class FollowsTheTrainer(TrainerCallback):
    """Before the first step: a changed weight must change the sampler's log-probs as it changes the trainer's.

    The output layer is scaled, synced, compared and put back. It is the weight that stays behind where it is tied to
    the embedding. Costs three weight syncs and four small forward passes, once.
    """

    SCALE = 1.5

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: the sampler did not follow.
        """
        from trustrl.engines.vllm.sync import probe_gap

        generation = self._trainer.vllm_generation
        if generation.enable_sleep_mode or getattr(self._trainer.accelerator.state, "fsdp_plugin", None) is not None:
            return  # a sleeping sampler cannot be asked; a sharded weight cannot be scaled from here
        weight = self._trainer.model.get_output_embeddings().weight
        before = weight.detach().clone()
        generation.sync_weights()
        usual = probe_gap(generation).mean().item()
        try:
            with torch.no_grad():
                weight.mul_(self.SCALE)
            generation.sync_weights()
            changed = probe_gap(generation).mean().item()
        finally:
            with torch.no_grad():
                weight.copy_(before)
            generation.sync_weights()
        if not changed <= 3 * usual + 1e-3:
            raise EngineError(
                f"The sampler must follow the trainer's weights: with its output layer scaled by {self.SCALE:g} the "
                f"mean |Δ log p| must stay near {usual:.3g}, got {changed:.3g} nats. The weight did not reach it: "
                "check the weight sync, above all for tied embeddings. startup_checks=False trains all the same."
            )
