"""Model forward pass that returns the part of the vocabulary that a region reads.

Regions on sampled tokens use the trainer's own log-probs. Top-K, projected, and exact regions need more of the
vocabulary. For them, `VocabularyForward` adds a keyword to the model's forward. Called with the keyword, the wrapped
model runs as always (DDP, FSDP, and PEFT hooks included) and ends in `token_logprobs` instead of logits.

For engines that compute log-probs from logits themselves, `LogitsForward` returns both. The logits stay as the model
returned them: engines divide them in place by the temperature. The read happens inside the forward pass, from the
states that enter the output layer. FSDP2 has the layer's weight gathered there. It gathers the weight again for the
backward pass of every tensor in a field of the output, so `LogitsOutput` declares the fields.
"""

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trustrl.engines.common.vocabulary_read import Head, Opaque, VocabularyOutput, Wanted, read_vocabulary
from trustrl.errors import ConfigError, EngineError

KEYWORD = "trustrl_vocabulary"
"""The keyword that is added to a model's forward. Its value is an `Opaque` request."""


class VocabularyForward:
    """Adds the keyword to one model's forward, and keeps the head of the rollout weights for exact divergences.

    Args:
        model: The model. Its `forward` is replaced on the instance.
        float32_head: Whether to compute the output layer's products in float32.
    """

    def __init__(self, model: nn.Module, *, float32_head: bool) -> None:
        self.float32_head = float32_head
        self.rollout_head: Head | None = None
        self._original = original = model.forward
        self._pending: tuple[Wanted, list[VocabularyOutput]] | None = None

        @functools.wraps(type(model).forward)  # `generate` reads the signature
        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            request: Opaque[Wanted] | None = kwargs.pop(KEYWORD, None)
            if request is not None:
                return self._run(this, request.value, *args, **kwargs)
            if self._pending is None:
                return original(*args, **kwargs)
            wanted, outputs = self._pending
            outputs.append(self._run(this, wanted, *args, **kwargs))
            return outputs[-1]

        model.forward = types.MethodType(forward, model)

    @contextmanager
    def pending(self, wanted: Wanted) -> Iterator[list[VocabularyOutput]]:
        """Makes a request in the next forward pass, for engines whose own code calls the model without the keyword.

        The output is the one that forward returned: FSDP2 adds its backward hooks to these tensors, and rounds copies.

        Yields:
            A list that receives the output of the pass.

        Raises:
            EngineError: If the model is not called exactly once in the context.
        """
        outputs: list[VocabularyOutput] = []
        self._pending = (wanted, outputs)
        try:
            yield outputs
        finally:
            self._pending = None
        if len(outputs) != 1:
            raise EngineError(
                f"The trainer must call the model once for each micro-batch, got {len(outputs)} calls. Choose a region "
                "on the sampled token such as dppo-binary-tv."
            )

    def remember_head(self, model: nn.Module) -> Head:
        """Keeps a copy of the current head, and returns it. Exact divergences are measured against it."""
        self.rollout_head = read_head(model).copied()
        return self.rollout_head

    def _run(self, model: Any, wanted: Wanted, *args: Any, **kwargs: Any) -> VocabularyOutput:
        for name in ("labels", "fused_lm_head"):
            kwargs.pop(name, None)
        kwargs["use_cache"] = False
        return self._read(model, wanted.states(model.base_model(*args, **kwargs).last_hidden_state), wanted)

    def _read(self, model: Any, states: Tensor, wanted: Wanted) -> VocabularyOutput:
        gather_head(model)
        head = read_head(model)
        if self.rollout_head is not None:
            # Outside a forward pass, FSDP2 holds weights in float32. The rollout's pass had them in its own dtype.
            self.rollout_head = self.rollout_head.to(head.weight.dtype)
        output = read_vocabulary(
            states.to(head.weight.device), head, wanted, rollout_head=self.rollout_head, float32=self.float32_head
        )
        layer = model.get_output_embeddings()
        if isinstance(layer, FSDPModule) and not torch.is_grad_enabled():
            layer.reshard()  # with gradients enabled, the backward pass reshards
        return output


def read_head(model: Any) -> Head:
    """Returns the current output layer; FSDP and PEFT may have replaced it since the last call."""
    layer = model.get_output_embeddings()
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(weight, DTensor):  # FSDP2; gathers with gradient
        weight = weight.full_tensor()
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    config = model.config.get_text_config()
    return Head(weight, bias, logit_scale(config), softcap(config))


def gather_head(model: Any) -> None:
    """Gathers an output layer that FSDP2 shards separately from the rest of the model.

    FSDP2 gathers a layer when the layer is called. trustrl reads the weight without a call. Gathered any other way, the
    weight's gradient would be each rank's own instead of the mean over ranks. If the layer is already gathered, this
    has no effect.
    """
    find = getattr(model, "get_output_embeddings", None)  # wrappers such as DDP lack it, and do not shard weights
    head = None if find is None else find()
    if isinstance(head, FSDPModule):
        head.unshard()


def softcap(config: Any) -> float | None:
    """Returns c if the model's logits are c·tanh(logits / c), else None. Each model family has its own name for c."""
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    return None


def logit_scale(config: Any) -> float:
    """Returns the factor that the model multiplies its logits by. Each model family has its own name for it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)


def adapted_head(model: Any) -> str | None:
    """Returns the kind of an output layer that is more than its `.weight` (adapted, quantized), or None."""
    layer = model.get_output_embeddings()
    plain = isinstance(layer, nn.Linear) and not hasattr(layer, "base_layer")
    return None if plain and layer.weight.is_floating_point() else type(layer).__name__


def refuse_adapted_head(model: Any) -> None:
    """Raises if the output layer is more than its `.weight`."""
    kind = adapted_head(model)
    if kind is not None:
        raise ConfigError(
            f"The model's output layer must be a plain linear layer, got {kind}. trustrl reads its weight and would "
            "miss the part that an adapter adds. Leave the output layer out of `target_modules`, `modules_to_save`, "
            "and quantization."
        )


class ModelProxy:
    """Model whose calls a subclass changes. Everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class UnroundedModel(ModelProxy):
    """Model proxy that returns outputs as the forward pass computed them, where FSDP2 would round them.

    accelerate shards a model with an `output_dtype` of bf16 or fp16. FSDP2 then casts every floating tensor of the
    model's output after the forward pass, log-probs included: a log-prob of -10 keeps three digits. It registers its
    backward hooks on the tensors before it casts them, so a loss on those has the same gradient.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass."""
        computed: list[Any] = []
        hook = self._model.register_forward_hook(
            lambda module, inputs, output: computed.append(output),
            prepend=True,  # before FSDP2's own hook, which casts
        )
        try:
            output = self._model(*args, **kwargs)
        finally:
            hook.remove()
        for name, x in computed[0].items():
            # Logits come from rounded products: the wider copy would cost memory and hold no more digits.
            if name != "logits" and isinstance(x, Tensor) and output[name].dtype != x.dtype:
                output[name] = x
        return output


def unrounded(model: Any) -> Any:
    """Returns the model, in a proxy if FSDP2 may round its outputs."""
    return UnroundedModel(model) if isinstance(model, FSDPModule) else model


@dataclass
class LogitsOutput(VocabularyOutput):
    """The fields of a model's output that engines use, and the vocabulary."""

    logits: Tensor | None = None
    aux_loss: Tensor | None = None


class LogitsForward(VocabularyForward):
    """Adds the keyword to one model's forward, which runs unchanged and returns its logits too.

    Costs one more product with the output layer, in tiles, and no further pass through the model.

    Raises:
        ConfigError: If the output layer is more than its weight.
    """

    def __init__(self, model: nn.Module, *, float32_head: bool) -> None:
        refuse_adapted_head(model)
        super().__init__(model, float32_head=float32_head)

    def _run(self, model: Any, wanted: Wanted, *args: Any, **kwargs: Any) -> LogitsOutput:
        entering: list[Tensor] = []
        layer = model.get_output_embeddings()
        hook = layer.register_forward_hook(lambda module, inputs, output: entering.append(inputs[0]))
        try:
            output = self._original(*args, **kwargs)
        finally:
            hook.remove()
        if len(entering) != 1:
            raise EngineError(
                f"The model must call its output layer once in a forward pass, got {len(entering)} calls. Choose a "
                "region on the sampled token such as dppo-binary-tv."
            )
        read = self._read(model, wanted.states(entering[0]), wanted)
        parts = {field.name: getattr(read, field.name) for field in fields(read)}
        return LogitsOutput(**parts, logits=output.logits, aux_loss=getattr(output, "aux_loss", None))


class AskingModel(ModelProxy):
    """Model proxy that makes one request in every call, and keeps the outputs.

    Args:
        model: The model that the trainer calls, whose forward takes the keyword.
        wanted: The request.
    """

    def __init__(self, model: Any, wanted: Any) -> None:
        super().__init__(unrounded(model))
        self._wanted = wanted
        self.outputs: list[Any] = []
        """The output of each call, with one row per token."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass."""
        return self._ask(self._wanted, *args, **kwargs)

    def _ask(self, wanted: Wanted, *args: Any, **kwargs: Any) -> Any:
        # A keyword of the model's own forward: the hooks of DDP, FSDP and PEFT run. Opaque: none of them casts it.
        kwargs[KEYWORD] = Opaque(wanted)
        self.outputs.append(self._model(*args, **kwargs))
        return self.outputs[-1]
