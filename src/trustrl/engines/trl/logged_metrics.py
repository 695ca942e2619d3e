"""TRL's own metrics that the region changes."""

from typing import Any

import torch
from torch import Tensor

from trustrl.core.policy_loss import LossOutput
from trustrl.engines.common.step_metrics import CLIP

UNSCORED = "frac_reward_nan"
"""Share of completions for which no reward function returned a number. TRL sets their advantage to 0."""


class TrlMetrics:
    """Corrects the metrics that TRL's loss logs with advantages of 0."""

    def __init__(self) -> None:
        self._policy_losses: list[Tensor] = []
        """Of the step's micro-batches, on the device until the step ends."""

    def correct(self, trainer: Any, out: LossOutput) -> None:
        """Corrects the metrics of one micro-batch. Waits for the device at most once per step.

        Args:
            trainer: TRL's trainer, which holds the metrics.
            out: The result of the region's loss.
        """
        mode = "train" if trainer.model.training else "eval"
        for name, values in trainer._metrics[mode].items():
            if name.startswith(CLIP) and values:
                values.pop()  # the step's metrics have the region's
        if "policy_loss" not in trainer._metrics[mode]:
            return
        # With an entropy bonus TRL logs it, without the region, and before dividing by the accumulated steps.
        accumulated = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        self._policy_losses.append(out.terms["policy"].float() * (1 if trainer.loss_type == "dapo" else accumulated))
        if trainer.accelerator.sync_gradients:
            own = torch.stack(self._policy_losses).unsqueeze(0)
            self._policy_losses.clear()
            logged = trainer._metrics[mode]["policy_loss"]
            for index, value in enumerate(trainer.accelerator.gather(own).nanmean(0).tolist(), start=-own.shape[1]):
                logged[index] += value
