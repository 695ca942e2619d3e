"""The vocabulary pass of verl's Megatron engine: tensor, pipeline, context and expert parallel, packed or padded.

Seams:    the engine's `prepare_model_inputs` (marks the micro-batch), `_lm_head_logits_processor` (gets hidden states
          where logits were, in verl's own layout) and `prepare_model_outputs`; the output layer's `forward`, which
          returns hidden states while a marked micro-batch runs. All are replaced on the instance
Borrowed: everything else: the pipeline's schedule, packing, context parallelism, router replay, gradient reduction
Cost:     between tensor-parallel ranks, what `trustrl.kernels.vocab_parallel` states; between context-parallel ranks 4
          bytes per number and token, gathered by verl. Nothing between pipeline stages
"""

import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor
from verl.models.mcore import util as packing
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from trustrl.core.token_logprobs import VocabShard
from trustrl.engines.common import seam
from trustrl.engines.common.vocabulary_forward import logit_scale, softcap
from trustrl.engines.common.vocabulary_read import Head, VocabularyOutput, read_vocabulary
from trustrl.engines.verl import anchors
from trustrl.engines.verl.response_layout import Places, places
from trustrl.engines.verl.vocabulary_pass import VocabularyPass
from trustrl.errors import ConfigError, EngineError

_FOUND = "trustrl_found_"
"""The prefix of the pass's results on their way through verl's unpacking."""

_PROCESSOR_PARAMETERS = ("self", "logits", "label", "temperature")


class MegatronPass(VocabularyPass):
    """The pass of a `MegatronEngineWithLMHead`."""

    def _extend(self) -> None:
        _check_seams()
        self._what: str | None = None
        self._weight: Tensor | None = None
        self._current: tuple[Places, Tensor | None]
        self._rollout_head: Head | None = None
        self._last: Any = None  # the model's last part, if this rank's pipeline stage holds it
        for part in _models(self._engine):
            if part.post_process:
                _refuse_unreadable(part, self._engine)
                self._last = part
                self._extend_output_layer(part.output_layer)
        self._process, self._outputs = self._engine._lm_head_logits_processor, self._engine.prepare_model_outputs
        self._engine._lm_head_logits_processor = self._process_states
        self._engine.prepare_model_outputs = self._prepare_outputs

    def _extend_output_layer(self, layer: Any) -> None:
        original = layer.forward

        def forward(input_: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            if self._what is None:
                return original(input_, weight, *args, **kwargs)
            self._weight = layer.weight if weight is None else weight
            if layer.sequence_parallel:  # the backward pass adds up the ranks' gradients and scatters them
                input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True)
            return input_, None

        layer.forward = forward

    def remember_head(self) -> None:
        """Keeps a copy of this rank's part of the output layer if exact divergences are measured against it."""
        if self.needs.full and self._last is not None:
            weight = self._last.output_layer.weight
            if weight is None:  # shared with this stage's embedding
                weight = self._last.shared_embedding_or_output_weight()
            self._rollout_head = Head(_words(weight, self._engine)[0]).copied()

    def _prepare_inputs(self, batch: Any) -> dict[str, Any]:
        self._what = anchors.mark(batch)
        return self._inputs(batch)

    def _process_states(self, logits: Tensor, label: Tensor, temperature: Tensor, **settings: Any) -> dict[str, Tensor]:
        """Reads the vocabulary from the hidden states that verl takes for logits."""
        if self._what is None:
            return self._process(logits, label, temperature, **settings)
        states, batch = logits, settings["batch"]
        where = places(batch)
        numbers = self._token_numbers(where, batch, settings["data_format"])
        if numbers.shape != states.shape[:2]:
            raise EngineError(
                f"verl must lay out tokens as {tuple(states.shape[:2])}, as its model did, got {tuple(numbers.shape)}. "
                "Install a verl version listed in trustrl's documentation."
            )
        cells = (numbers >= 0).nonzero(as_tuple=True)
        wanted = self._wanted(self._what, where, batch)
        self._current = where, wanted.kept_ids
        if len(cells[0]):
            wanted = wanted.at(numbers[cells], where.states)
        else:  # one ignored row: ranks take part in the same collectives, and hidden states keep their gradient
            cells = (cells[0].new_zeros(1), cells[1].new_zeros(1))
            wanted = _ignored_row(wanted)
        assert self._weight is not None
        weight, start = _words(self._weight, self._engine)
        group = parallel_state.get_tensor_model_parallel_group()
        shard = VocabShard(group, start, reduce_hidden_gradient=not self._last.output_layer.sequence_parallel)
        # Megatron's `Float16Module` converts whatever its model returns to float32, as it would logits.
        chosen = states[cells].to(weight.dtype)
        results = read_vocabulary(chosen, Head(weight), wanted, rollout_head=self._rollout_head, shard=shard)
        return {
            _FOUND + name: x.new_zeros((*numbers.shape, *x.shape[1:])).index_put(cells, x)
            for name, x in results.items()
            if name != "kept_ids"
        }

    def _token_numbers(self, where: Places, batch: Any, data_format: str) -> Tensor:
        """Returns which of the N tokens in the loss each of this rank's states predicts, or −1, in verl's layout."""
        # verl's own packing lays the numbers out, so its layout is not repeated here. They start at 1: it pads with 0.
        numbers = where.packed.new_zeros(where.num_packed)
        numbers[where.packed] = torch.arange(1, len(where.packed) + 1, device=numbers.device)
        nested = torch.nested.nested_tensor_from_jagged(numbers, where.offsets)
        model, settings = unwrap_model(self._engine.module[-1]), self._engine.engine_config
        fp8 = model.config.fp8 in ("e4m3", "hybrid")
        if data_format == "bshd":
            longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
            laid_out = packing.preprocess_bshd_engine(nested, use_fp8_padding=fp8, forced_max_seqlen=longest)[0]
        else:
            laid_out = packing.preprocess_thd_engine(
                nested,
                use_fp8_padding=fp8,
                pad_to_length_bucket=settings.pad_to_length_bucket if settings.pad_to_length else None,
                cp_layout=self._engine._get_context_parallel_layout(model),
            )[0]
        return laid_out - 1

    def _prepare_outputs(self, output: Any, data: Any) -> Any:
        if self._what is None:
            return self._outputs(output, data)
        where, kept_ids = self._current  # of the micro-batch that was just processed
        results = {name.removeprefix(_FOUND): x.values()[where.packed] for name, x in output.items()}
        return self._results(self._what, VocabularyOutput(**results, kept_ids=kept_ids), where, data)


def warn_of_padding(engine: Any) -> None:
    """Warns if verl's own log-probs include ids that no tokenizer has.

    Megatron pads the vocabulary, for one to a multiple of the tensor-parallel size, and verl's softmax runs over the
    padding too. The vocabulary pass leaves it out.
    """
    size = _text_config(engine).vocab_size
    padded = max((part.vocab_size for part in _models(engine) if part.post_process), default=size)
    if padded > size:
        warnings.warn(
            f"Megatron pads the vocabulary from {size:,} to {padded:,} ids, and verl's own log-probs are those of the "
            "padded vocabulary. The sampler's are not, so ratios differ from 1 before the first step. Set "
            "make_vocab_size_divisible_by so that the tensor-parallel size times it divides the vocabulary.",
            stacklevel=2,
        )


def _models(engine: Any) -> list[Any]:
    """Returns this rank's parts of the language model: one for each virtual pipeline stage."""
    parts = [unwrap_model(part) for part in engine.module]
    return [getattr(part, "language_model", part) for part in parts]


def _text_config(engine: Any) -> Any:
    return engine.model_config.hf_config.get_text_config()


def _words(weight: Tensor, engine: Any) -> tuple[Tensor, int]:
    """Returns this rank's part of the output layer without padding, and the id of its first row."""
    start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    size = min(len(weight), _text_config(engine).vocab_size - start)
    return weight if size == len(weight) else weight[:size], start


def _ignored_row(wanted: Any) -> Any:
    """Returns the request for one row that is skipped."""

    def row(x: Tensor) -> Tensor:
        return x.new_full((1, *x.shape[1:]), -1 if not x.is_floating_point() else 0)

    per_token = {name: row(x) for name, x in wanted._asdict().items() if isinstance(x, Tensor)}
    return wanted._replace(**per_token)


def _refuse_unreadable(model: Any, engine: Any) -> None:
    """Raises if the output layer is more than a weight, or if this rank holds only padding of it.

    Raises:
        ConfigError: If a setting must change.
    """
    layer, config, text = model.output_layer, model.config, _text_config(engine)
    if not isinstance(layer, ColumnParallelLinear) or layer.bias is not None or layer.gather_output:
        raise ConfigError(
            "The model's output layer must be Megatron's plain ColumnParallelLinear, without a bias and not gathered, "
            f"got {type(layer).__name__}. trustrl reads its weight and would miss the part that an adapter adds. Leave "
            "output_layer out of `lora.target_modules` and quantization."
        )
    if config.defer_embedding_wgrad_compute:
        raise ConfigError(
            "defer_embedding_wgrad_compute must be False with a region that reads the vocabulary, got True. Megatron "
            "would wait for gradients of the output layer that this region computes itself."
        )
    if config.mtp_num_layers and engine.model_config.mtp.enable_train:
        raise ConfigError(
            "model.mtp.enable_train must be False with a region that reads the vocabulary, got True. The output layer "
            "must return logits for multi-token prediction."
        )
    if logit_scale(text) != 1.0 or softcap(text) is not None:
        raise ConfigError(
            f"The model's logits must be neither scaled nor capped on Megatron, got {text.model_type}. Use "
            "actor.strategy=fsdp2, which trustrl tests with such models, or a region on the sampled token."
        )
    ranks, rows = parallel_state.get_tensor_model_parallel_world_size(), model.vocab_size
    if rows // ranks * (ranks - 1) >= text.vocab_size:
        raise ConfigError(
            f"Every tensor-parallel rank must hold ids of the vocabulary, got {text.vocab_size:,} ids padded to "
            f"{rows:,} on {ranks} ranks. Use fewer tensor-parallel ranks."
        )


def _check_seams() -> None:
    owner = MegatronEngineWithLMHead
    seam.require_parameters(owner, "prepare_model_inputs", ("self", "batch"))
    seam.require_parameters(owner, "prepare_model_outputs", ("self", "output", "data"))
    seam.require_parameters(owner, "_lm_head_logits_processor", _PROCESSOR_PARAMETERS, more=True)
    seam.require_parameters(packing, "preprocess_thd_engine", ("input_ids",), more=True)
    seam.require_parameters(packing, "preprocess_bshd_engine", ("input_ids",), more=True)
