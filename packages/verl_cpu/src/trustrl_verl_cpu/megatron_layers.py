"""Megatron-Core's local layers on a CPU, without transformer-engine.

Megatron leaves packed sequences, context parallelism and norms under sequence parallelism to transformer-engine. Here
its own `DotProductAttention` and `WrappedTorchNorm` learn them, and its mixture of experts accepts tensors that are not
on a GPU.
"""

import functools
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from trustrl.engines.common import seam

CORE = "megatron.core"
PACKAGE = "megatron-core"

NO_FUSION = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of Megatron's `TransformerConfig` that need kernels for a GPU."""

_MARK = "trustrl_verl_cpu"


def install() -> None:
    """Replaces the parts of Megatron's layers that need a GPU. Later calls have no effect.

    Raises:
        EngineError: If Megatron does not have these names, or calls them in a different way.
    """
    attention: Any = import_module(f"{CORE}.transformer.dot_product_attention").DotProductAttention
    if hasattr(attention.forward, _MARK):
        return
    norm: Any = import_module(f"{CORE}.transformer.torch_norm").WrappedTorchNorm
    dispatcher, moe = (import_module(f"{CORE}.transformer.moe.{name}") for name in ("token_dispatcher", "moe_utils"))
    for owner, name, expected in (
        (attention, "__init__", ("self", "config", "layer_number", "attn_mask_type", "attention_type")),
        (attention, "forward", FORWARD),
        (norm, "__new__", ("cls", "config", "hidden_size", "eps")),
        (dispatcher, "maybe_move_tensor_to_cpu", ("tensor", "as_numpy", "record_stream")),
    ):
        more = name in ("__init__", "__new__")
        seam.require_parameters(owner, name, expected, more=more, package=PACKAGE)
    attention.__init__ = _with_context_parallelism(attention.__init__)
    attention.forward = _with_packed_sequences(attention.forward)
    norm.__new__ = torch_norm
    setattr(dispatcher, "maybe_move_tensor_to_cpu", as_asked)  # noqa: B010
    if not hasattr(moe, "te_general_gemm"):  # Megatron tests this name and leaves it undefined
        setattr(moe, "te_general_gemm", None)  # noqa: B010


FORWARD = (
    "self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params",
)  # fmt: skip


def torch_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *_: Any, **__: Any) -> torch.nn.Module:
    """Returns torch's norm. Megatron adds its gradient over the ranks that hold parts of a sequence."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(normalized_shape=hidden_size, eps=eps)
    for weight in norm.parameters():
        setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return norm


def as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns the tensor, as an array if asked. Megatron's function converts only tensors on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _with_context_parallelism(init: Any) -> Any:
    @functools.wraps(init)
    def initialize(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        ranks, config.context_parallel_size = config.context_parallel_size, 1  # refused otherwise
        try:
            init(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = ranks

    return initialize


def _with_packed_sequences(dense: Any) -> Any:
    @functools.wraps(dense)
    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        if packed_seq_params is not None:
            return packed_attention(query, key, value, packed_seq_params, self.softmax_scale)
        if attention_mask is not None and attention_mask.ndim == 2:
            # Sequences are padded on the right, so a causal mask hides the padding.
            attention_mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).triu(1)[None, None]
        return dense(self, query, key, value, attention_mask, attn_mask_type, attention_bias)

    setattr(forward, _MARK, True)
    return forward


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    """Computes causal attention within each of the packed sequences, over all context-parallel ranks.

    Args:
        query: (tokens of this rank, ..., heads, size).
        key: The same with the heads of keys.
        value: Like `key`.
        packed: Megatron's `PackedSeqParams`.
        scale: The factor of the scores.

    Returns:
        (tokens of this rank, ..., heads × size).
    """
    group = import_module(f"{CORE}.parallel_state").get_context_parallel_group()
    rank, ranks, shape = group.rank(), group.size(), query.shape
    query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    keys, values = (_GatherSequence.apply(x, group) if ranks > 1 else x.unsqueeze(0) for x in (key, value))
    bounds, out = packed.cu_seqlens_q_padded.tolist(), []
    for start, end in pairwise(bounds):
        here = slice(start // ranks, end // ranks)
        own = positions(end - start, rank, ranks)
        all_ranks = torch.cat([positions(end - start, peer, ranks) for peer in range(ranks)])
        k, v = (x[:, here].flatten(0, 1) for x in (keys, values))
        out.append(_attend(query[here], k, v, all_ranks.unsqueeze(0) <= own.unsqueeze(1), scale))
    return torch.cat(out).reshape(*shape[:-2], -1)


def positions(length: int, rank: int, ranks: int) -> Tensor:
    """Returns the positions of a padded sequence's tokens on a context-parallel rank, in the rank's order.

    A rank holds one chunk from each half of the sequence, so that all ranks have the same work.
    """
    if ranks == 1:
        return torch.arange(length)
    chunk = length // ranks // 2
    first, last = rank * chunk, length - (rank + 1) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


def _attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)


class _GatherSequence(torch.autograd.Function):
    """Stacks the ranks' parts: (T, ...) → (ranks, T, ...). The gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None
