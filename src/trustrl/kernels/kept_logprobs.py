"""Log-probs inside kept sets: a softmax over a few ids per row, with a different number of ids in each.

    log π̃(j) = logit(j) − logsumexp over the row's ids

N: rows, D: hidden size, V: vocabulary, K: width of the id array, P: ids in all rows together.

Cost: P·D multiplications forward and twice that backward, whatever K is. Memory beyond the results: `PAIR_ELEMENTS`
numbers per operand at a time, and one more gradient of the head's size.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.kernels import vocab_parallel
from trustrl.kernels.pass_inputs import slices
from trustrl.kernels.vocab_parallel import VocabShard

PAIR_ELEMENTS = 1 << 24
"""Largest number of gathered elements of the head at a time."""


def kept_logprobs(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    ids_NK: Int[Tensor, "N K"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    shard: VocabShard | None = None,
) -> Float[Tensor, "N K"]:
    """Returns the log-probs of a softmax over each row's ids, with gradient.

    Args:
        hidden_ND: The last hidden states.
        head_VD: The output layer's weight.
        ids_NK: The ids of each row; below 0 for padding, where the result is −inf.
        temperature: The number that divides the logits.
        bias: The output layer's bias.
        softcap: Bends logits into ±softcap, as in Gemma.
        shard: Set it if the head is this rank's part of a sharded vocabulary. Ranks then add up 4 bytes per id.
    """
    there_NK = ids_NK >= 0
    rows_P, columns_P = there_NK.nonzero(as_tuple=True)
    ids_P = ids_NK[rows_P, columns_P].long()
    if shard is None:
        logits_P = _logits(hidden_ND, head_VD, bias, rows_P, ids_P)
    else:
        if shard.reduce_hidden_gradient:
            hidden_ND = vocab_parallel.summed_gradient(hidden_ND, shard)
        ids_P, inside_P = vocab_parallel.local_ids(ids_P, shard, len(head_VD))
        own = _logits(hidden_ND, head_VD, bias, rows_P[inside_P], ids_P[inside_P])
        logits_P = vocab_parallel.summed(own.new_zeros(len(ids_P)).index_put((inside_P,), own), shard)
    if softcap is not None:
        logits_P = softcap * torch.tanh(logits_P / softcap)
    # A row without ids would have a NaN gradient, so it gets a finite filling.
    some_N1 = there_NK.any(-1, keepdim=True)
    filling_NK = torch.where(some_N1, -torch.inf, 0.0).to(logits_P.dtype).expand(there_NK.shape)
    logits_NK = filling_NK.index_put((rows_P, columns_P), logits_P / temperature)
    return torch.where(there_NK, torch.log_softmax(logits_NK, dim=-1), -torch.inf)


def _logits(hidden_ND: Tensor, head_VD: Tensor, bias: Tensor | None, rows_P: Tensor, ids_P: Tensor) -> Tensor:
    """Returns hidden[row] · head[id] + bias[id] of P pairs."""
    function: Any = _PairDots
    dots_P = function.apply(hidden_ND, head_VD, rows_P, ids_P)
    return dots_P if bias is None else dots_P + bias[ids_P].to(dots_P.dtype)


class _PairDots(torch.autograd.Function):
    """hidden[row] · head[id] of P pairs, in float32 or better."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, rows_P: Tensor, ids_P: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, head_VD, rows_P, ids_P)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        dots_P = hidden_ND.new_empty(len(ids_P), dtype=dtype)
        for part in _parts(len(ids_P), hidden_ND.shape[1]):
            hidden, head = hidden_ND[rows_P[part]].to(dtype), head_VD[ids_P[part]].to(dtype)
            dots_P[part] = (hidden * head).sum(-1)
        return dots_P

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient_P,) = gradients
        hidden_ND, head_VD, rows_P, ids_P = ctx.saved_tensors
        dtype = gradient_P.dtype
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        # Pairs with the same id are summed in the wide dtype, and rounded to the head's once.
        seen_U, place_P = ids_P.unique(return_inverse=True)
        d_hidden = torch.zeros_like(hidden_ND, dtype=dtype) if wants_hidden else None
        d_seen = head_VD.new_zeros((len(seen_U), head_VD.shape[1]), dtype=dtype) if wants_head else None
        for part in _parts(len(ids_P), hidden_ND.shape[1]):
            weight = gradient_P[part].unsqueeze(-1)
            if d_hidden is not None:
                d_hidden.index_add_(0, rows_P[part], weight * head_VD[ids_P[part]].to(dtype))
            if d_seen is not None:
                d_seen.index_add_(0, place_P[part], weight * hidden_ND[rows_P[part]].to(dtype))
        d_head = None
        if d_seen is not None:
            d_head = torch.zeros_like(head_VD)
            d_head[seen_U] = d_seen.to(head_VD.dtype)
        return None if d_hidden is None else d_hidden.to(hidden_ND.dtype), d_head, None, None


def _parts(pairs: int, width: int) -> list[slice]:
    return slices(pairs, max(1, PAIR_ELEMENTS // max(width, 1)))
