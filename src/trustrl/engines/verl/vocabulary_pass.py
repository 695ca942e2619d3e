"""Forward passes of verl's engines for regions that read more of the vocabulary than the sampled token.

verl's engine prepares the model's inputs and reads its outputs. For batches marked `trustrl_pass`, a pass extends both,
and the model's forward pass ends in `token_logprobs`. Logits of tokens × vocabulary are never created, and the output
layer skips prompts. `FSDPPass` and `MegatronPass` know how each engine runs its model.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from trustrl.config.axes import Needs
from trustrl.core.records import FullDivergence, TopK
from trustrl.core.sampling import KeptSet
from trustrl.engines.common.kept_policy import anchor_fields, policy_fields, sampled_logp
from trustrl.engines.common.vocabulary_read import Wanted
from trustrl.engines.verl import anchors
from trustrl.engines.verl.response_layout import Places, like_responses, padded
from trustrl.errors import EngineError


class Seen(NamedTuple):
    """Results of the last forward pass besides log-probs: further fields of `RolloutTokens` and `PolicyTokens`."""

    rollout: dict[str, Any]
    policy: dict[str, Any]


class VocabularyPass(ABC):
    """Extension of one engine and its model that returns the part of the vocabulary that a region reads."""

    def __init__(self, engine: Any, needs: Needs, *, truncated: bool) -> None:
        self.needs, self.truncated = needs, truncated
        self._engine = engine
        self._inputs = engine.prepare_model_inputs
        self._seen: Seen | None = None
        self._extend()
        engine.prepare_model_inputs = self._prepare_inputs

    @classmethod
    def of(cls, engine: Any, needs: Needs, *, truncated: bool) -> Self:
        """Returns the engine's pass, and creates it on the first call. A second pass would wrap the first.

        Args:
            engine: verl's engine.
            needs: The region's needs.
            truncated: Whether tokens are drawn from a part of the vocabulary.
        """
        found = getattr(engine.prepare_model_inputs, "__self__", None)
        if not isinstance(found, cls):
            return cls(engine, needs, truncated=truncated)
        found.needs, found.truncated = needs, truncated
        return found

    @abstractmethod
    def remember_head(self) -> None:
        """Keeps a copy of the current output layer if exact divergences are measured against it."""

    @abstractmethod
    def _extend(self) -> None:
        """Extends the engine's model and what reads its outputs. Raises if the region cannot read its vocabulary."""

    @abstractmethod
    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the engine's `prepare_model_inputs`."""

    def take(self) -> Seen:
        """Returns the results of the forward pass before this loss, once.

        Raises:
            EngineError: If no pass was made: verl runs the model in a way that this adapter does not support.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            raise EngineError(
                "verl must run the model through prepare_model_inputs and prepare_model_outputs before each loss, and "
                "it did not. Train through train_mini_batch, with a verl version listed in trustrl's documentation."
            )
        return seen

    def _wanted(self, what: str, where: Places, data: Any) -> Wanted:
        """Returns what to read at the N tokens in the loss of one micro-batch.

        Args:
            what: The mark of the batch.
            where: The tokens.
            data: The micro-batch.

        Raises:
            EngineError: If the micro-batch has several temperatures.
        """
        temperature = data["temperature"]
        if isinstance(temperature, Tensor):
            raise EngineError(
                "temperature must be one number for a batch, got one for each sequence. Use one temperature per batch."
            )
        more: dict[str, Any] = {}
        if self.truncated:
            more["kept_ids"] = where.rows(anchors.kept_ids(data))
        elif what == "record":
            more = {"top_k": self.needs.topk, "hidden": self.needs.full}
        elif self._is_anchor(what):
            more = {"top_k": self.needs.topk}
        else:
            more = self._read_by_loss(where, data)
        if what != "record":
            more["entropy_gradient"] = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
        return Wanted(where.rows(padded(data["responses"])), where.states, float(temperature), **more)

    def _read_by_loss(self, where: Places, data: Any) -> dict[str, Any]:
        """Returns what the loss reads of the whole vocabulary."""
        more: dict[str, Any] = {"top_k": self.needs.topk if self.needs.fills else 0}
        if self.needs.topk:
            more["gather_ids"] = where.rows(anchors.topk(self.needs, data).ids)
        if self.needs.full:
            more["anchor_hidden"] = where.rows(padded(data["trustrl_hidden"]))
            more["anchor_logsumexp"] = where.rows(padded(data["trustrl_logsumexp"]))
        return more

    def _results(self, what: str, output: Any, where: Places, data: Any) -> dict[str, Tensor]:
        """Returns the model's output in verl's form. Keeps what only the region reads for `take`.

        Args:
            what: The mark of the batch.
            output: A `VocabularyOutput` of the N tokens in the loss.
            where: The tokens.
            data: The micro-batch.
        """
        found = {"log_probs": where.as_model_output(output.log_probs)}
        if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False):
            found["entropy"] = where.as_model_output(output.entropy)
        if what == "record":
            return found | self._recorded(output, where, data)
        self._seen = self._seen_by_loss(what, output, where, data)
        return found

    def _is_anchor(self, what: str) -> bool:
        """Returns whether the distribution of this pass is the region's anchor as well as the policy."""
        return what == "first" and self.needs.anchor == "proximal"

    def _own_topk(self, output: Any, where: Places, data: Any) -> TopK:
        """Returns the policy's own most probable ids as the anchor's, without gradient."""
        ids, logp, tail = output.topk_ids, output.topk_logp, output.topk_tail_logp
        if self.truncated:
            kept, token_ids = self._kept(output, where, data)
            fields = anchor_fields(kept, self.needs, token_ids)
            ids, logp, tail = (fields[f"topk_{name}"] for name in ("ids", "logp", "tail_logp"))
        logp, tail = where.padded(logp.detach()), where.padded(tail.detach())
        return TopK(where.padded(ids, -1).long(), logp, of=self.needs.anchor, tail_logp=tail)

    def _recorded(self, output: Any, where: Places, data: Any) -> dict[str, Tensor]:
        """Returns π' as fields to add to the batch."""
        if self.truncated:
            kept, token_ids = self._kept(output, where, data)
            fields = anchor_fields(kept, self.needs, token_ids)
            return {
                f"trustrl_{name}": like_responses(where.padded(x, -1 if name == "topk_ids" else 0), data)
                for name, x in fields.items()
            }
        columns = {"trustrl_logp": (output.log_probs, 0)}
        if self.needs.topk:
            columns["trustrl_topk_ids"] = (output.topk_ids.int(), -1)
            columns["trustrl_topk_logp"] = (output.topk_logp, 0)
            columns["trustrl_topk_tail_logp"] = (output.topk_tail_logp, 0)
        if self.needs.full:
            columns |= {"trustrl_hidden": (output.hidden, 0), "trustrl_logsumexp": (output.logsumexp, 0)}
        return {name: like_responses(where.padded(x, fill), data) for name, (x, fill) in columns.items()}

    def _seen_by_loss(self, what: str, output: Any, where: Places, data: Any) -> Seen:
        policy: dict[str, Any] = {"entropy": where.padded(output.entropy.detach())}
        rollout: dict[str, Any] = {}
        same = self._is_anchor(what)
        if self.needs.topk:
            rollout["topk"] = self._own_topk(output, where, data) if same else anchors.topk(self.needs, data)
        if self.truncated:
            rollout["kept_ids"] = where.padded(output.kept_ids, -1)
            return Seen(rollout, policy | self._inside_kept(output, where, data, rollout.get("topk")))
        if self.needs.topk:
            policy["topk_logp"] = where.padded(output.topk_logp if same else output.gathered_logp)
            policy["tail_logp"] = where.padded(output.topk_tail_logp if same else output.tail_logp)
        if self.needs.topk and self.needs.fills:
            own = where.padded(output.topk_ids, -1), where.padded(output.topk_logp)
            policy["topk"] = TopK(*own, of=self.needs.anchor)
        if self.needs.full:
            zero = torch.zeros_like(policy["entropy"])
            tv, kl = (zero, zero) if same else (where.padded(output.tv), where.padded(output.kl))
            policy["full_divergence"] = FullDivergence(tv=tv, kl=kl, of=self.needs.anchor)
        return Seen(rollout, policy)

    def _inside_kept(self, output: Any, where: Places, data: Any, topk: TopK | None) -> dict[str, Any]:
        """Returns the policy's log-probs inside the kept sets."""
        kept, token_ids = self._kept(output, where, data)
        found = policy_fields(kept, self.needs, None if topk is None else where.rows(topk.ids), token_ids)
        own: TopK | None = found.pop("topk", None)
        policy: dict[str, Any] = {name: where.padded(x) for name, x in found.items()}
        if own is not None:
            policy["topk"] = TopK(where.padded(own.ids, -1), where.padded(own.logp), of=self.needs.anchor)
        return policy | {"logp": where.padded(sampled_logp(kept, token_ids))}

    def _kept(self, output: Any, where: Places, data: Any) -> tuple[KeptSet, Tensor]:
        """Returns the policy inside the kept sets, and the sampled tokens, one row per token in the loss."""
        return KeptSet(output.kept_ids, output.kept_logp), where.rows(padded(data["responses"]))
