"""Top-K and projected regions, and truncated sampling, in OpenRLHF's actor.

Seam:     the model's `forward`, read by `LogitsForward`, and `Actor.forward`, which calls it: without gradients for a
          rollout, in `PolicyModelActor.forward`, and with gradients in `ActorPPOTrainer.training_step`
Anchors:  π' and π come from trustrl's read of the output layer, inside the kept ids if sampling is truncated.
          OpenRLHF's log-probs are those of logits in the weights' dtype and of the whole vocabulary, and stay in its KL
          and entropy terms
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from openrlhf.models import Actor
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.config.terms import TokenWeights
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.core.sampling import KeptSet
from trustrl.engines.common import seam
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import LogitsForward
from trustrl.engines.common.vocabulary_read import (
    VocabularyOutput,
    Wanted,
    anchor_fields,
    at_completions,
    packed_kept,
    policy_fields,
    read_by_policy,
    sampled_logp,
)
from trustrl.engines.openrlhf.anchor_rows import AnchorRow, RecordedLogp, carried, is_read_in_a_rollout
from trustrl.engines.openrlhf.losses import SAMPLED, RegionLoss
from trustrl.engines.openrlhf.sampled_rows import SampledRow
from trustrl.errors import ConfigError, MissingDataError

SCORED_WITH = ("self", "sequences", "action_mask", "attention_mask", "return_output")


@dataclass(frozen=True)
class Update:
    """One micro-batch of an update, at its N tokens in the loss."""

    where: TokenPlaces
    token_ids: Tensor
    needs: Needs
    anchor: AnchorRow | None
    """π' by trustrl's read; None if the region does not need it."""

    topk: TopK | None
    """The top K of the region's anchor."""

    outputs: list[VocabularyOutput]
    """Receives the policy's output in the forward pass."""

    @cached_property
    def policy(self) -> dict[str, Any]:
        """The fields of `PolicyTokens`, after the forward pass."""
        (output,) = self.outputs
        if output.kept_ids is None or output.kept_logp is None:
            return {"logp": output.log_probs, **read_by_policy(output, self.needs)}
        kept = KeptSet(output.kept_ids, output.kept_logp)
        more = policy_fields(kept, self.needs, None if self.topk is None else self.topk.ids, self.token_ids)
        return {"logp": sampled_logp(kept, self.token_ids), **more}


class VocabularyLoss(RegionLoss):
    """`RegionLoss` that takes π and π' from `update` instead of OpenRLHF's log-probs."""

    update: Update | None = None
    """The micro-batch of the running step."""

    def _check(self) -> None:
        """Does nothing: the rows of refused settings have every condition."""

    def _compared(self, log_probs: Tensor, old_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        assert self.update is not None  # within `VocabularyPass.updating`
        where, anchor = self.update.where, self.update.anchor
        old = old_log_probs if anchor is None else where.padded(anchor.logp)
        return where.padded(self.update.policy["logp"]), old

    def _region_loss(self, log_probs: Tensor, rollout: RolloutTokens, reduction: TokenWeights) -> LossOutput:
        assert self.update is not None
        where = self.update.where
        SAMPLED.require_anchors(rollout, self.region)
        columns = ("behavior_logp", "proximal_logp", "advantage", "version")
        known = {name: x for name in columns if (x := getattr(rollout, name)) is not None}
        packed = replace(
            rollout,
            **{name: where.of(x) for name, x in known.items()},
            in_loss=torch.ones_like(where.row, dtype=torch.bool),
            token_ids=self.update.token_ids,
            sequence_ids=where.row,
            topk=self.update.topk,
        )
        return policy_loss(
            PolicyTokens(**self.update.policy, version=self._updates()),
            packed,
            self.region,
            reduction=TokenWeights(where.of(reduction.weights), like=reduction.like),
        )


class VocabularyPass:
    """The reads of the vocabulary by one actor: for a rollout with its log-probs, and in an update for its loss.

    Args:
        actor: OpenRLHF's actor. Its `forward` is replaced on the instance.
        loss: The loss that OpenRLHF calls in each training step.
        truncated: Whether tokens are drawn from a part of the vocabulary.

    Raises:
        ConfigError: If the actor reads images, or its output layer is more than a weight.
        EngineError: If `Actor.forward` takes other parameters.
    """

    def __init__(self, actor: Any, loss: VocabularyLoss, *, truncated: bool = False) -> None:
        seam.require_parameters(Actor, "forward", SCORED_WITH, more=True, package="openrlhf")
        if getattr(actor, "is_vlm", False):
            raise ConfigError(
                f"--actor.model_name_or_path must be a text model with {loss.region.kind}, got one for images. Choose "
                "a region on the sampled token such as dppo-binary-tv-capped, and --rollout.top_p 1.0."
            )
        self._actor, self._loss, self._needs = actor, loss, loss.region.needs()
        self._truncated = truncated
        self._scores = is_read_in_a_rollout(loss.region, truncated=truncated)
        self._kept: Sequence[KeptColumn] = ()
        model = getattr(actor.model, "module", actor.model)  # in DeepSpeed's engine
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # in PEFT's
        self._forward = LogitsForward(base, float32_head=False)
        self._score = actor.forward
        actor.forward = self._scored

    @contextmanager
    def scoring(self, kept: Sequence[KeptColumn]) -> Iterator[None]:
        """Renormalizes the log-probs of a rollout over these ids, one column per sequence."""
        self._kept = kept
        try:
            yield
        finally:
            self._kept = ()

    @contextmanager
    def updating(self, experience: Any, sampled: SampledRow | None) -> Iterator[None]:
        """Reads the vocabulary in the one forward pass of a training step, for the loss of the same step.

        Args:
            experience: The micro-batch. If the region reads π', it was recorded by the same class.
            sampled: The sampler's record of its tokens, if there is one.

        Raises:
            MissingDataError: If the micro-batch does not carry π'.
        """
        mask = experience.action_mask.bool()
        anchor = carried(experience, mask.sum(1).tolist()) if self._scores else None
        topk = self._topk(anchor, sampled, mask.device)
        more: dict[str, Any] = {}
        if self._truncated:
            assert sampled is not None  # checked with the rows
            assert sampled.kept is not None
            more["kept_ids"] = packed_kept([sampled.kept], mask.device)
        elif topk is not None:
            more = {"gather_ids": topk.ids, "top_k": self._needs.topk if self._needs.fills else 0}
        where, wanted = self._wanted(experience.sequences, mask, **more)
        with self._forward.pending(wanted) as outputs:
            self._loss.update = Update(where, wanted.ids, self._needs, anchor, topk, outputs)
            try:
                yield
            finally:
                self._loss.update = None

    def _topk(self, anchor: AnchorRow | None, sampled: SampledRow | None, device: torch.device) -> TopK | None:
        """Returns the top K of the region's anchor; None if the region reads none."""
        if not self._needs.topk:
            return None
        if self._needs.anchor == "behavior":
            assert sampled is not None  # checked with the rows
            ids, logp = (torch.from_numpy(x).to(device) for x in (sampled.topk_ids, sampled.topk_logp))
            return TopK(ids, logp, of="behavior")
        assert anchor is not None
        _, ids, logp, tail_logp = anchor
        assert ids is not None  # as `_scored` made it
        assert logp is not None
        return TopK(ids, logp, of="proximal", tail_logp=tail_logp)

    def _scored(self, sequences: Tensor, action_mask: Any = None, *args: Any, **options: Any) -> Any:
        """Runs `Actor.forward`. Without gradients, which is for a rollout, also records π' if the region reads it.

        Raises:
            MissingDataError: If sampling is truncated, and the kept ids did not come with the rollout.
        """
        if torch.is_grad_enabled() or action_mask is None or not self._scores:
            return self._score(sequences, action_mask, *args, **options)
        if self._truncated != bool(self._kept):
            raise MissingDataError(
                f"PolicyModelActor.forward must receive the kept ids of each sequence, got {len(self._kept)} columns. "
                "Check that every node has the same trustrl and OpenRLHF."
            )
        of_trainer = self._needs.topk if self._needs.anchor == "proximal" else 0
        read: dict[str, Any] = {"top_k": of_trainer}
        if self._truncated:
            read = {"kept_ids": packed_kept(self._kept, sequences.device)}
        where, wanted = self._wanted(sequences, action_mask.bool(), **read)
        with self._forward.pending(wanted) as outputs:
            logp = self._score(sequences, action_mask, *args, **options)
        (output,) = outputs
        fields: dict[str, Any] = {name: getattr(output, name) for name in AnchorRow._fields[1:]}
        fields["logp"] = output.log_probs
        if output.kept_ids is not None and output.kept_logp is not None:
            fields = anchor_fields(KeptSet(output.kept_ids, output.kept_logp), self._needs, wanted.ids)
        names = AnchorRow._fields if of_trainer else ("logp",)
        columns = [where.split(_narrow(fields[name]).cpu()) for name in names]
        return RecordedLogp(logp, [AnchorRow(*row) for row in zip(*columns, strict=True)])

    def _wanted(self, sequences: Tensor, mask: Tensor, **more: Any) -> tuple[TokenPlaces, Wanted]:
        where = TokenPlaces.of_mask(mask)
        return where, at_completions(sequences, where, temperature=self._actor.temperature, **more)


def _narrow(x: Tensor) -> Tensor:
    """Returns ids as int32."""
    return x if x.is_floating_point() else x.int()
