"""Model forward pass that returns the part of the vocabulary that a region reads.

Regions on sampled tokens use the trainer's own log-probs. Top-K, projected, and exact regions need more of the
vocabulary. For them, `VocabularyForward` adds a keyword to the model's forward. Called with the keyword, the wrapped
model runs as always (DDP, FSDP, and PEFT hooks included) and ends in `token_logprobs` instead of logits.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

from trustrl.core.token_logprobs import AnchorStates, token_logprobs
from trustrl.errors import ConfigError, EngineError
from trustrl.kernels.kept_logprobs import kept_logprobs

KEYWORD = "trustrl_vocabulary"
"""The keyword that is added to a model's forward."""


class Wanted(NamedTuple):
    """The part of the vocabulary that a region reads, and the tokens where it reads it.

    Per-token tensors are returned in the shape of `ids`.
    """

    ids: Tensor
    """(*batch): the tokens to score; below 0 for rows to skip."""

    states: Callable[[Tensor], Tensor]
    """Maps the last hidden states, (B, L, D), to those that predict `ids`, (*batch, D)."""

    temperature: float = 1.0
    gather_ids: Tensor | None = None
    """(*batch, K): the ids at which to read the policy's log-probs."""

    top_k: int = 0
    entropy_gradient: bool = False
    hidden: bool = False
    """True to return the hidden states, from which exact divergences are measured later."""

    anchor_hidden: Tensor | None = None
    """(*batch, D): the hidden states that were returned at the rollout weights."""

    anchor_logsumexp: Tensor | None = None

    kept_ids: Tensor | None = None
    """(*batch, K): the ids that truncated sampling kept, below 0 for padding, to return log-probs inside them."""


def at_completions(labels: Tensor, length: int, **more: Any) -> Wanted:
    """Returns the request for the last `length` tokens of each of B sequences. The state before a token predicts it."""
    return Wanted(labels[:, -length:], lambda states: states[:, -length - 1 : -1], **more)


@dataclass
class VocabularyOutput(ModelOutput):
    """Per-token tensors. The first two have the names that the trainers' own fused heads use."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    gathered_logp: Tensor | None = None
    tail_logp: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logp: Tensor | None = None
    topk_tail_logp: Tensor | None = None
    tv: Tensor | None = None
    kl: Tensor | None = None
    hidden: Tensor | None = None
    logsumexp: Tensor | None = None
    kept_ids: Tensor | None = None
    kept_logp: Tensor | None = None


class Head(NamedTuple):
    """An output layer: logits = softcap(scale · (hidden @ weight.T + bias)) / temperature."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


class VocabularyForward:
    """Adds the keyword to one model's forward, and keeps the head of the rollout weights for exact divergences.

    Args:
        model: The model. Its `forward` is replaced on the instance.
        float32_head: Whether to compute the output layer's products in float32.
    """

    def __init__(self, model: nn.Module, *, float32_head: bool) -> None:
        self.float32_head = float32_head
        self.rollout_head: Head | None = None
        original = model.forward

        @functools.wraps(type(model).forward)  # `generate` reads the signature
        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop(KEYWORD, None)
            return original(*args, **kwargs) if wanted is None else self._run(this, wanted, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def remember_head(self, model: nn.Module) -> Head:
        """Keeps a copy of the current head, and returns it. Exact divergences are measured against it."""
        head = read_head(model)
        trained = head.weight.requires_grad
        self.rollout_head = head._replace(
            weight=head.weight.detach().clone() if trained else head.weight.detach(),
            bias=None if head.bias is None else head.bias.detach().clone(),
        )
        return self.rollout_head

    def _run(self, model: Any, wanted: Wanted, *args: Any, **kwargs: Any) -> VocabularyOutput:
        for name in ("labels", "fused_lm_head"):
            kwargs.pop(name, None)
        kwargs["use_cache"] = False
        states = wanted.states(model.base_model(*args, **kwargs).last_hidden_state)
        gather_head(model)
        head = read_head(model)
        batch = wanted.ids.shape
        states = states.to(head.weight.device).reshape(-1, states.shape[-1])
        token_ids = wanted.ids.reshape(-1).to(states.device)
        out = self._pass(states, head, token_ids, wanted)
        kept_ids = None if wanted.kept_ids is None else wanted.kept_ids.reshape(len(token_ids), -1)
        shaped = {
            name: None if x is None else x.reshape(*batch, *x.shape[1:])
            for name, x in {
                "log_probs": out.logp,
                "entropy": out.entropy,
                "gathered_logp": out.gathered_logp,
                "tail_logp": out.tail_logp,
                "topk_ids": None if out.topk is None else out.topk.ids,
                "topk_logp": None if out.topk is None else out.topk.logp,
                "topk_tail_logp": None if out.topk is None else out.topk.tail_logp,
                "tv": out.tv,
                "kl": out.kl,
                "hidden": states.detach() if wanted.hidden else None,
                "logsumexp": out.logsumexp.detach() if wanted.hidden else None,
                "kept_ids": kept_ids,
                "kept_logp": None if kept_ids is None else _inside(states, head, kept_ids, wanted.temperature),
            }.items()
        }
        layer = model.get_output_embeddings()
        if isinstance(layer, FSDPModule) and not torch.is_grad_enabled():
            layer.reshard()  # with gradients enabled, the backward pass reshards
        return VocabularyOutput(**shaped)

    def _pass(self, states: Tensor, head: Head, token_ids: Tensor, wanted: Wanted) -> Any:
        def scaled(x: Tensor, by: float) -> Tensor:
            return x if by == 1.0 else x * by

        against = None
        if wanted.anchor_hidden is not None:
            old = self.rollout_head
            if old is None:
                raise EngineError(
                    "The head of the rollout weights must be kept before exact divergences are measured, and it was "
                    "not. Call remember_head first."
                )
            hidden = scaled(wanted.anchor_hidden.reshape(-1, states.shape[-1]), old.scale)
            lse = None if wanted.anchor_logsumexp is None else wanted.anchor_logsumexp.reshape(-1)
            against = AnchorStates(hidden.to(states.dtype), old.weight, _scaled_bias(old), lse)
        gather = wanted.gather_ids
        return token_logprobs(
            scaled(states, head.scale),
            head.weight,
            torch.where(token_ids < 0, -1, token_ids),
            gather_ids=None if gather is None else gather.reshape(len(token_ids), gather.shape[-1]).long(),
            top_k=wanted.top_k,
            entropy=True if wanted.entropy_gradient else "detached",
            against=against,
            temperature=wanted.temperature,
            bias=_scaled_bias(head),
            softcap=head.softcap,
            product_dtype=torch.float32 if self.float32_head else None,
        )


def _inside(states: Tensor, head: Head, kept_ids: Tensor, temperature: float) -> Tensor:
    """Returns log-probs inside the kept ids."""
    return kept_logprobs(
        states if head.scale == 1.0 else states * head.scale,
        head.weight,
        kept_ids,
        temperature=temperature,
        bias=_scaled_bias(head),
        softcap=head.softcap,
    )


def _scaled_bias(head: Head) -> Tensor | None:
    return head.bias if head.bias is None or head.scale == 1.0 else head.bias * head.scale


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
