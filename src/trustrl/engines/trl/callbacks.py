"""Trainer callbacks: two checks around the first step."""

from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from trustrl.errors import EngineError


class RegionActs(TrainerCallback):
    """Check after the first step that the region's loss ran.

    Args:
        trainer: The trainer.
        hidden_by: The class in front of `TrustRegionMixin` that overrides a loss, or None.
    """

    def __init__(self, trainer: Any, hidden_by: type | None) -> None:
        self._trainer = trainer
        self._hidden_by = hidden_by

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: If a whole step was trained without the region.
        """
        if self._trainer._num_losses == 0:
            by = "Something" if self._hidden_by is None else self._hidden_by.__name__
            raise EngineError(
                "The region's loss must run in every step, and it never ran. "
                f"{by} overrides `_compute_loss` or `compute_loss` in front of the region. Call super() in it, or "
                "write `class Mine(TrustRegionMixin, MyGRPOTrainer)` with the override in MyGRPOTrainer."
            )


class FollowsTheTrainer(TrainerCallback):
    """Check before the first step that vLLM follows the trainer's weights.

    The check scales the output layer, syncs the weights, compares the log-probs of sampler and trainer, and restores
    the layer. It uses the output layer because that is the weight that a sync misses if it is tied to the embedding.
    Costs three weight syncs and four small forward passes, once.
    """

    SCALE = 1.5

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs the check.

        Raises:
            EngineError: If the sampler did not follow.
        """
        from trustrl.engines.vllm.weight_sync import probe_gap

        generation = self._trainer.vllm_generation
        if generation.enable_sleep_mode or getattr(self._trainer.accelerator.state, "fsdp_plugin", None) is not None:
            return  # a sleeping sampler cannot score, and a sharded weight cannot be scaled here
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
                f"mean |Δ log p| must stay near {usual:.3g}, got {changed:.3g} nats. The weight did not reach the "
                "sampler. Check the weight sync, above all for tied embeddings. Set startup_checks=False to train "
                "without this check."
            )
