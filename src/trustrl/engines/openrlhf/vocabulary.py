"""Top-K and projected regions in OpenRLHF's actor.

Seam:     the model's `forward`, read by `LogitsForward`, and `Actor.forward`, which calls it: without gradients for a
          rollout, in `PolicyModelActor.forward`, and with gradients in `ActorPPOTrainer.training_step`
Anchors:  π' and π come from trustrl's read of the output layer. OpenRLHF's log-probs are those of logits in the
          weights' dtype, and stay in its KL and entropy terms
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from openrlhf.models import Actor
from torch import Tensor

from trustrl.config.terms import TokenWeights
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.engines.common import seam
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import LogitsForward
from trustrl.engines.common.vocabulary_read import VocabularyOutput, Wanted, at_completions, read_by_policy
from trustrl.engines.openrlhf.anchor_rows import AnchorRow, RecordedLogp, carried
from trustrl.engines.openrlhf.losses import SAMPLED, RegionLoss
from trustrl.errors import ConfigError

SCORED_WITH = ("self", "sequences", "action_mask", "attention_mask", "return_output")


class Update(NamedTuple):
    """One micro-batch of an update, at its N tokens in the loss."""

    where: TokenPlaces
    token_ids: Tensor
    anchor: AnchorRow
    outputs: list[VocabularyOutput]
    """Receives the policy's output in the forward pass."""


class VocabularyLoss(RegionLoss):
    """`RegionLoss` that takes π and π' from `update` instead of OpenRLHF's log-probs."""

    update: Update | None = None
    """The micro-batch of the running step."""

    def _check(self) -> None:
        """Does nothing: the rows of refused settings have every condition."""

    def _region_loss(self, log_probs: Tensor, rollout: RolloutTokens, reduction: TokenWeights) -> LossOutput:
        assert self.update is not None  # within `VocabularyPass.updating`
        where, token_ids, anchor, (output,) = self.update
        needs = self.region.needs()
        SAMPLED.require_anchors(rollout, self.region)
        assert output.log_probs is not None  # always read
        behavior = rollout.behavior_logp
        return policy_loss(
            PolicyTokens(logp=output.log_probs, **read_by_policy(output, needs)),
            RolloutTokens(
                behavior_logp=None if behavior is None else where.of(behavior),
                proximal_logp=anchor.logp,
                advantage=where.of(rollout.advantage),
                in_loss=torch.ones_like(where.row, dtype=torch.bool),
                token_ids=token_ids,
                sequence_ids=where.row,
                topk=TopK(anchor.topk_ids, anchor.topk_logp, of=needs.anchor, tail_logp=anchor.topk_tail_logp),
            ),
            self.region,
            reduction=TokenWeights(where.of(reduction.weights), like=reduction.like),
        )


class VocabularyPass:
    """The reads of the vocabulary by one actor: for a rollout with its log-probs, and in an update for its loss.

    Args:
        actor: OpenRLHF's actor. Its `forward` is replaced on the instance.
        loss: The loss that OpenRLHF calls in each training step.

    Raises:
        ConfigError: If the actor reads images, or its output layer is more than a weight.
        EngineError: If `Actor.forward` takes other parameters.
    """

    def __init__(self, actor: Any, loss: VocabularyLoss) -> None:
        seam.require_parameters(Actor, "forward", SCORED_WITH, more=True, package="openrlhf")
        if getattr(actor, "is_vlm", False):
            raise ConfigError(
                f"--actor.model_name_or_path must be a text model with {loss.region.kind}, got one for images. Choose "
                "a region on the sampled token such as dppo-binary-tv-capped."
            )
        self._actor, self._loss, self._needs = actor, loss, loss.region.needs()
        model = getattr(actor.model, "module", actor.model)  # in DeepSpeed's engine
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # in PEFT's
        self._forward = LogitsForward(base, float32_head=False)
        self._score = actor.forward
        actor.forward = self._scored

    @contextmanager
    def updating(self, experience: Any) -> Iterator[None]:
        """Reads the vocabulary in the one forward pass of a training step, for the loss of the same step.

        Args:
            experience: The micro-batch, whose anchor was recorded by the same class.

        Raises:
            MissingDataError: If the micro-batch does not carry the anchor.
        """
        mask = experience.action_mask.bool()
        anchor = carried(experience, mask.sum(1).tolist())
        own = self._needs.topk if self._needs.fills else 0
        where, wanted = self._wanted(experience.sequences, mask, gather_ids=anchor.topk_ids, top_k=own)
        with self._forward.pending(wanted) as outputs:
            self._loss.update = Update(where, wanted.ids, anchor, outputs)
            try:
                yield
            finally:
                self._loss.update = None

    def _scored(self, sequences: Tensor, action_mask: Any = None, *args: Any, **options: Any) -> Any:
        """Runs `Actor.forward`. Without gradients, which is for a rollout, also records the anchor's top K."""
        if torch.is_grad_enabled() or action_mask is None:
            return self._score(sequences, action_mask, *args, **options)
        where, wanted = self._wanted(sequences, action_mask.bool(), top_k=self._needs.topk)
        with self._forward.pending(wanted) as outputs:
            logp = self._score(sequences, action_mask, *args, **options)
        (output,) = outputs
        assert output.topk_ids is not None  # requested
        columns = (output.log_probs, output.topk_ids.int(), output.topk_logp, output.topk_tail_logp)
        rows = zip(*(where.split(column.cpu()) for column in columns if column is not None), strict=True)
        return RecordedLogp(logp, [AnchorRow(*row) for row in rows])

    def _wanted(self, sequences: Tensor, mask: Tensor, **more: Any) -> tuple[TokenPlaces, Wanted]:
        where = TokenPlaces.of_mask(mask)
        return where, at_completions(sequences, where, temperature=self._actor.temperature, **more)
