"""OpenRLHF's actor trainer with a region's loss. Only the loss and its metrics differ from OpenRLHF's.

Importing this module replaces the trainer and its Ray actor in `openrlhf.trainer.ray.ppo_actor`. Ray's workers may
import either of the two modules first.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray
import torch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from torch import Tensor

from trustrl.engines.common import seam
from trustrl.engines.common.sampled_record import UNKNOWN
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.openrlhf.launcher import VARIABLE, check_settings, is_truncated
from trustrl.engines.openrlhf.losses import RegionLoss, Versions
from trustrl.engines.openrlhf.sampled_rows import KEPT, SampledRow, is_recorded, joined, require_rows, sampled_rows
from trustrl.engines.openrlhf.vocabulary import VocabularyLoss, VocabularyPass

STEPS_WITH = ("self", "experience", "kl_ctl", "step", "loss_batch_info")
SCORES_WITH = ("self", "sequences", "action_mask", "attention_mask", "packed_seq_lens", "mm_train_inputs_list")


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
        self._truncated = is_truncated(strategy.args)
        self._is_recorded = is_recorded(region, truncated=self._truncated)
        self._updates = 0
        self._vocabulary: VocabularyPass | None = None
        if region.needs().topk or self._truncated:
            loss = VocabularyLoss(region, mode)
            self._vocabulary = VocabularyPass(actor, loss, truncated=self._truncated)
            self.actor_loss_fn = loss
        else:
            self.actor_loss_fn = RegionLoss(region, mode)

    def scoring(self, inputs: Any) -> AbstractContextManager[Any]:
        """Returns the context of OpenRLHF's pass over a rollout.

        Args:
            inputs: The `mm_train_inputs` of its sequences, with the kept ids if sampling is truncated.
        """
        if self._vocabulary is None or not self._truncated:
            return nullcontext()
        return self._vocabulary.scoring([sequence[KEPT] for sequence in inputs or ()])

    def broadcast_to_vllm(self) -> None:
        """Runs OpenRLHF's method, and counts the updates of the sampler's weights as its actor does."""
        super().broadcast_to_vllm()
        self._updates += 1

    def training_step(
        self, experience: Any, kl_ctl: float, step: int, loss_batch_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Runs OpenRLHF's step and adds the region's metrics to its status, averaged over tokens."""
        sampled, updating = None, nullcontext()
        if self._is_recorded:
            mask = experience.action_mask.bool()
            sampled = joined(require_rows(sampled_rows(experience), mask.cpu(), truncated=self._truncated))
            self.actor_loss_fn.versions = self._versions(sampled, mask)
        if self._vocabulary is not None:
            updating = self._vocabulary.updating(experience, sampled)
        with updating:
            status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        metrics = self.actor_loss_fn.metrics()
        status["metrics"].update(metrics)
        status["weights"].update(dict.fromkeys(metrics, "token"))
        return status

    def _versions(self, sampled: SampledRow, mask: Tensor) -> Versions | None:
        if (sampled.version == UNKNOWN).any():
            return None
        return Versions(
            self._updates, TokenPlaces.of_mask(mask).padded(torch.from_numpy(sampled.version).to(mask.device))
        )


_Stock: Any = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__  # pyright: ignore
"""OpenRLHF's class, which Ray's decorator hides."""

seam.require_parameters(_Stock, "forward", SCORES_WITH, more=True)


class RegionPolicyModelActor(_Stock):
    """`PolicyModelActor` that passes the kept ids of a rollout on to its trainer."""

    def forward(
        self,
        sequences: Any,
        action_mask: Any = None,
        attention_mask: Any = None,
        packed_seq_lens: Any = None,
        mm_train_inputs_list: Any = None,
    ) -> Any:
        """Runs OpenRLHF's method."""
        with self.trainer.scoring(mm_train_inputs_list):
            return super().forward(sequences, action_mask, attention_mask, packed_seq_lens, mm_train_inputs_list)


ppo_actor.ActorPPOTrainer = RegionActorPPOTrainer
ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(RegionPolicyModelActor)
