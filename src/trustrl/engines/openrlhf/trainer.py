"""OpenRLHF's actor trainer with a region's loss. Only the loss and its metrics differ from OpenRLHF's.

Importing this module replaces the trainer in `openrlhf.trainer.ray.ppo_actor`. Ray's workers may import either of the
two modules first.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from trustrl.engines.common import seam
from trustrl.engines.openrlhf.launcher import VARIABLE, check_settings
from trustrl.engines.openrlhf.losses import RegionLoss
from trustrl.engines.openrlhf.vocabulary import VocabularyLoss, VocabularyPass

STEPS_WITH = ("self", "experience", "kl_ctl", "step", "loss_batch_info")


class RegionActorPPOTrainer(ActorPPOTrainer):
    """`ActorPPOTrainer` whose `actor_loss_fn` is the region that the variable TRUSTRL_REGION names.

    Raises:
        ConfigError: If a setting does not work with the region; see `check_settings`.
        EngineError: If OpenRLHF's trainer differs from the one that this adapter was written for.
    """

    def __init__(self, strategy: Any, actor: Any, *args: Any, **kwargs: Any) -> None:
        seam.require_parameters(ActorPPOTrainer, "training_step", STEPS_WITH)
        region = check_settings(strategy.args, os.environ.get(VARIABLE))
        super().__init__(strategy, actor, *args, **kwargs)
        # OpenRLHF has no registry of losses, and builds its own in the constructor.
        mode = strategy.args.actor.loss_agg_mode
        self._updating: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        if region.needs().topk:
            self.actor_loss_fn = VocabularyLoss(region, mode)
            self._updating = VocabularyPass(actor, self.actor_loss_fn).updating
        else:
            self.actor_loss_fn = RegionLoss(region, mode)

    def training_step(
        self, experience: Any, kl_ctl: float, step: int, loss_batch_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Runs OpenRLHF's step and adds the region's metrics to its status, averaged over tokens."""
        with self._updating(experience):
            status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        metrics = self.actor_loss_fn.metrics()
        status["metrics"].update(metrics)
        status["weights"].update(dict.fromkeys(metrics, "token"))
        return status


ppo_actor.ActorPPOTrainer = RegionActorPPOTrainer
