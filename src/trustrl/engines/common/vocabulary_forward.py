"""Model forward pass that returns the part of the vocabulary that a region reads.

Regions on sampled tokens use the trainer's own log-probs. Top-K, projected, and exact regions need more of the
vocabulary. For them, `VocabularyForward` adds a keyword to the model's forward. Called with the keyword, the wrapped
model runs as always (DDP, FSDP, and PEFT hooks included) and ends in `token_logprobs` instead of logits.
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trustrl.engines.common.vocabulary_read import Head, Opaque, VocabularyOutput, Wanted, read_vocabulary
from trustrl.errors import ConfigError

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

        @functools.wraps(type(model).forward)  # `generate` reads the signature
        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            request: Opaque[Wanted] | None = kwargs.pop(KEYWORD, None)
            return original(*args, **kwargs) if request is None else self._run(this, request.value, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

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
    """Raises if the output layer is more than its `.weight`.

    Raises:
        ConfigError: If the output layer has an adapter or is quantized.
    """
    kind = adapted_head(model)
    if kind is not None:
        raise ConfigError(
            f"The model's output layer must be a plain linear layer, got {kind}. trustrl reads its weight and would "
            "miss the part that an adapter adds. Leave the output layer out of `target_modules`, `modules_to_save`, "
            "and quantization."
        )
