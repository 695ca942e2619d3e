"""Forward passes of verl's engines for regions that read more of the vocabulary than the sampled token.

verl's engine prepares the model's inputs and reads its outputs. For batches marked `trustrl_pass`, a pass extends both,
and the model's forward pass ends in `token_logprobs`. Logits of tokens × vocabulary are never created, and the output
layer skips prompts. `FSDPPass` and `MegatronPass` know how each engine runs its model.

`FSDPPass` serves verl's FSDP and VeOmni engines, with Ulysses sequence parallelism. The model's own forward gets a
keyword, so FSDP's hooks run as always. Under Ulysses, a rank's model sees tokens [rank · L, (rank + 1) · L) of the
packed micro-batch. The rank scores those in the loss, and verl's own function gathers the results: per token and rank 4
bytes for each number that the region reads, 2 D for the hidden states (in bf16) that exact divergences record.

Seams: the engine's `prepare_model_inputs`, on the instance, and `FSDPEngineWithLMHead.prepare_model_outputs`, on the
       class, so that VeOmni's engine attaches and checks routed experts after it as always
"""

import functools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from trustrl.config.axes import Needs
from trustrl.core.records import FullDivergence, TopK
from trustrl.core.sampling import KeptSet
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import KEYWORD, VocabularyForward, refuse_adapted_head
from trustrl.engines.common.vocabulary_read import (
    Opaque,
    VocabularyOutput,
    Wanted,
    anchor_fields,
    policy_fields,
    sampled_logp,
)
from trustrl.engines.verl import anchors
from trustrl.engines.verl.response_layout import Places, as_responses, places, taken
from trustrl.errors import EngineError


class Seen(NamedTuple):
    """Results of the last forward pass besides log-probs: further fields of `RolloutTokens` and `PolicyTokens`."""

    tokens: TokenPlaces
    """The N tokens in the loss, for which all fields are."""

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
        owner = getattr(engine.prepare_model_inputs, "__self__", None)
        if not isinstance(owner, cls):
            return cls(engine, needs, truncated=truncated)
        owner.needs, owner.truncated = needs, truncated
        return owner

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
                "verl did not run the model through prepare_model_inputs and prepare_model_outputs before this loss. "
                "Train through train_mini_batch, with a verl version listed in trustrl's documentation."
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
            more["kept_ids"] = anchors.kept_ids(data)
        elif what == "record":
            more = {"top_k": self.needs.topk, "hidden": self.needs.full}
        elif self._is_anchor(what):
            more = {"top_k": self.needs.topk}
        else:
            more = self._read_by_loss(where.tokens, data)
        if what != "record":
            more["entropy_gradient"] = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
        return Wanted(taken(data["responses"], where.tokens), where.states, float(temperature), **more)

    def _read_by_loss(self, tokens: TokenPlaces, data: Any) -> dict[str, Any]:
        """Returns what the loss reads of the whole vocabulary."""
        more: dict[str, Any] = {"top_k": self.needs.topk if self.needs.fills else 0}
        if self.needs.topk:
            more["gather_ids"] = anchors.topk(self.needs, data, tokens).ids
        if self.needs.full:
            more["anchor_hidden"] = taken(data["trustrl_hidden"], tokens)
            more["anchor_logsumexp"] = taken(data["trustrl_logsumexp"], tokens)
        return more

    def _results(self, what: str, output: Any, where: Places, data: Any) -> dict[str, Tensor]:
        """Returns the model's output in verl's form. Keeps what only the region reads for `take`.

        Args:
            what: The mark of the batch.
            output: A `VocabularyOutput` of the N tokens in the loss.
            where: The tokens.
            data: The micro-batch.
        """
        fields = {"log_probs": where.as_model_output(output.log_probs)}
        if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False):
            fields["entropy"] = where.as_model_output(output.entropy)
        if what == "record":
            return fields | self._recorded(output, where.tokens, data)
        self._seen = self._seen_by_loss(what, output, where.tokens, data)
        return fields

    def _is_anchor(self, what: str) -> bool:
        """Returns whether the distribution of this pass is the region's anchor as well as the policy."""
        return what == "first" and self.needs.anchor == "proximal"

    def _own_topk(self, output: Any, tokens: TokenPlaces, data: Any) -> TopK:
        """Returns the policy's own most probable ids as the anchor's, without gradient."""
        ids, logp, tail = output.topk_ids, output.topk_logp, output.topk_tail_logp
        if self.truncated:
            fields = anchor_fields(*self._kept(output, tokens, data))
            ids, logp, tail = (fields[f"topk_{name}"] for name in ("ids", "logp", "tail_logp"))
        return TopK(ids.long(), logp.detach(), of=self.needs.anchor, tail_logp=tail.detach())

    def _recorded(self, output: Any, tokens: TokenPlaces, data: Any) -> dict[str, Tensor]:
        """Returns π' as fields to add to the batch."""
        if self.truncated:
            fields = anchor_fields(*self._kept(output, tokens, data))
        else:
            fields = {"logp": output.log_probs}
            if self.needs.topk:
                fields |= {"topk_ids": output.topk_ids.int(), "topk_logp": output.topk_logp}
                fields["topk_tail_logp"] = output.topk_tail_logp
            if self.needs.full:
                fields |= {"hidden": output.hidden, "logsumexp": output.logsumexp}
        return {
            f"trustrl_{name}": as_responses(x, tokens, data, -1 if name == "topk_ids" else 0)
            for name, x in fields.items()
        }

    def _seen_by_loss(self, what: str, output: Any, tokens: TokenPlaces, data: Any) -> Seen:
        policy: dict[str, Any] = {"entropy": output.entropy.detach()}
        rollout: dict[str, Any] = {}
        same = self._is_anchor(what)
        if self.needs.topk:
            own_topk = self._own_topk(output, tokens, data) if same else None
            rollout["topk"] = own_topk or anchors.topk(self.needs, data, tokens)
        if self.truncated:
            rollout["kept_ids"] = output.kept_ids
            kept, _, token_ids = self._kept(output, tokens, data)
            anchor_ids = rollout["topk"].ids if self.needs.topk else None
            policy |= policy_fields(kept, self.needs, anchor_ids, token_ids)
            return Seen(tokens, rollout, policy | {"logp": sampled_logp(kept, token_ids)})
        if self.needs.topk:
            policy["topk_logp"] = output.topk_logp if same else output.gathered_logp
            policy["tail_logp"] = output.topk_tail_logp if same else output.tail_logp
        if self.needs.topk and self.needs.fills:
            policy["topk"] = TopK(output.topk_ids, output.topk_logp, of=self.needs.anchor)
        if self.needs.full:
            # Policy and anchor are the same pass in the first update, so they do not differ.
            zero = torch.zeros_like(policy["entropy"])
            tv, kl = (zero, zero) if same else (output.tv, output.kl)
            policy["full_divergence"] = FullDivergence(tv=tv, kl=kl, of=self.needs.anchor)
        return Seen(tokens, rollout, policy)

    def _kept(self, output: Any, tokens: TokenPlaces, data: Any) -> tuple[KeptSet, Needs, Tensor]:
        """Returns the policy inside the kept sets, the region's needs, and the sampled tokens."""
        return KeptSet(output.kept_ids, output.kept_logp), self.needs, taken(data["responses"], tokens)


_READ = "trustrl_read"
"""The key of verl's `output_args` for the function that reads a marked micro-batch's output."""

_MARK = "trustrl_vocabulary_pass"


class FSDPPass(VocabularyPass):
    """The pass of an `FSDPEngineWithLMHead`."""

    def _extend(self) -> None:
        module = getattr(self._engine.module, "_fsdp_wrapped_module", self._engine.module)  # FSDP2 does not wrap
        self._model = module.get_base_model() if hasattr(module, "get_base_model") else module
        refuse_adapted_head(self._model)
        self._forward = VocabularyForward(self._model, float32_head=False)
        theirs = FSDPEngineWithLMHead.prepare_model_outputs
        # Once per process: a second replacement would wrap the first.
        if not hasattr(theirs, _MARK):
            FSDPEngineWithLMHead.prepare_model_outputs = _reading(theirs)

    def remember_head(self) -> None:
        """Keeps a copy of the current output layer if exact divergences are measured against it."""
        if self.needs.full:
            self._forward.remember_head(self._model)

    def _prepare_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, args = self._inputs(micro_batch=micro_batch)
        what = anchors.mark(micro_batch)
        if what is None:
            return inputs, args
        where = places(micro_batch)
        wanted = self._wanted(what, where, micro_batch)
        pad_size, request = args.get("pad_size", 0), wanted
        if self._engine.use_ulysses_sp:
            mine, here = _slice(where, pad_size)
            request = wanted.at(mine, lambda last_hidden: last_hidden[0, here])
        # FSDP2 casts floating tensors in arguments to the model's dtype, also inside named tuples. This hides them.
        inputs[KEYWORD] = Opaque(request)

        def read(output: VocabularyOutput) -> dict[str, Tensor]:
            if self._engine.use_ulysses_sp:
                output = self._gathered(output, wanted, where, pad_size)
            return self._results(what, output, where, micro_batch)

        return inputs, args | {_READ: read}

    def _gathered(self, output: VocabularyOutput, wanted: Wanted, where: Places, pad_size: int) -> VocabularyOutput:
        """Returns the results of all ranks of the sequence-parallel group, with gradient."""
        _, here = _slice(where, pad_size)
        length = _length(where, pad_size)

        def everywhere(x: Tensor) -> Tensor:
            laid_out = x.new_zeros((length, *x.shape[1:])).index_put((here,), x)
            # verl's gather scales the gradient for FSDP's mean over ranks.
            return self._engine._gather_and_unpad_packed(laid_out, pad_size)[where.packed]

        results = {name: everywhere(x) for name, x in output.items() if name != "kept_ids"}
        return VocabularyOutput(kept_ids=wanted.kept_ids, **results)


def _reading(theirs: Any) -> Any:
    """Returns verl's function, which marked micro-batches do not reach: their outputs have no logits."""

    @functools.wraps(theirs)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        read = output_args.get(_READ)
        if read is not None:
            return read(output)
        return theirs(self, output, output_args, micro_batch, logits_processor_func)

    setattr(prepare_model_outputs, _MARK, True)
    return prepare_model_outputs


def _length(where: Places, pad_size: int) -> int:
    """Returns the number of tokens that each rank's model sees."""
    return (where.num_packed + pad_size) // get_ulysses_sequence_parallel_world_size()


def _slice(where: Places, pad_size: int) -> tuple[Tensor, Tensor]:
    """Returns which tokens in the loss are predicted on this rank, and where among its tokens."""
    length = _length(where, pad_size)
    here = where.packed - get_ulysses_sequence_parallel_rank() * length
    mine = (here >= 0) & (here < length)
    return mine, here[mine]
