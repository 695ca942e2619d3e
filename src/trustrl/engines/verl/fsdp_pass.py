"""The vocabulary pass of verl's FSDP and VeOmni engines, with Ulysses sequence parallelism.

The model's own forward gets a keyword, so FSDP's hooks run as always. Under Ulysses, a rank's model sees tokens
[rank · L, (rank + 1) · L) of the packed micro-batch. The rank scores those in the loss, and verl's own function gathers
the results: per token and rank 4 bytes for each number that the region reads, 2 D for the hidden states (in bf16) that
exact divergences record.

Seams: the engine's `prepare_model_inputs`, on the instance, and `FSDPEngineWithLMHead.prepare_model_outputs`, on the
       class, so that VeOmni's engine attaches and checks routed experts after it as always
"""

import functools
from typing import Any

from torch import Tensor
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from trustrl.engines.common.vocabulary_forward import KEYWORD, VocabularyForward, refuse_adapted_head
from trustrl.engines.common.vocabulary_read import Opaque, VocabularyOutput, Wanted
from trustrl.engines.verl import anchors
from trustrl.engines.verl.response_layout import Places, places
from trustrl.engines.verl.vocabulary_pass import VocabularyPass

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
