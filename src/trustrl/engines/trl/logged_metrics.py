"""TRL's own metrics that the region changes."""

from typing import Any

from trustrl.core.policy_loss import LossOutput
from trustrl.engines.common.step_metrics import CLIP

UNSCORED = "frac_reward_nan"
"""Share of completions for which no reward function returned a number. TRL sets their advantage to 0."""


def correct_trls_metrics(trainer: Any, out: LossOutput) -> None:
    """Corrects the metrics that TRL's loss logged for one micro-batch with advantages of 0.

    Args:
        trainer: TRL's trainer, which holds the metrics.
        out: The result of the region's loss.
    """
    mode = "train" if trainer.model.training else "eval"
    for name, values in trainer._metrics[mode].items():
        if name.startswith(CLIP) and values:
            values.pop()  # the step's metrics have the region's
    if "policy_loss" in trainer._metrics[mode]:
        # With an entropy bonus TRL logs it, without the region, and before dividing by the accumulated steps.
        accumulated = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        own = out.terms["policy"].float() * (1 if trainer.loss_type == "dapo" else accumulated)
        trainer._metrics[mode]["policy_loss"][-1] += trainer.accelerator.gather(own).nanmean().item()
