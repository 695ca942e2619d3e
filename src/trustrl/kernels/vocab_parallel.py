"""Passes over a head that is sharded over ranks. Each rank streams its part of the vocabulary and exchanges only cells.

Per token and rank, forward: one all-gather of 4 (K + 3) bytes (the K + 1 given logits, the rest's log-sum-exp and
entropy), plus 12 bytes per id of `top_k` and 8 for exact divergences. Backward: one all-reduce of the hidden states'
gradient, as in any column-parallel layer. No collective carries the logits of the vocabulary.

All ranks must pass the same hidden states and ids, and use the results in the same loss.
"""
# torch leaves its collectives untyped.
# pyright: reportUnknownMemberType=false

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trustrl.kernels.derivatives import once_differentiable
from trustrl.kernels.logprob_outputs import LogitSummary


class VocabShard(NamedTuple):
    """The part of a sharded vocabulary that this rank's head holds."""

    group: Any
    """Process group over which the head is sharded. None is the default group."""

    start: int
    """Vocabulary id of the head's first row."""

    reduce_hidden_gradient: bool = True
    """Set to False if the engine sums the ranks' gradients of the hidden states itself (sequence parallelism)."""


def local_ids(ids: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor]:
    """Returns (ids relative to this rank's part, True where an id is in it). An id of another rank becomes 0."""
    local = ids - shard.start
    inside = (local >= 0) & (local < size)
    return torch.where(inside, local, 0), inside


def merge(shard: VocabShard, inside_NC: Tensor, local: LogitSummary) -> LogitSummary:
    """Returns the summary over the whole vocabulary, which is the same on every rank."""
    # Each id is on one rank, so the sum over ranks below selects its logit.
    own_NC = torch.where(inside_NC, local.given_NC, 0.0)
    packed = torch.cat([own_NC, local.rest_N.unsqueeze(-1), local.inner_N.unsqueeze(-1)], dim=-1)
    parts_RNC = _applied(_Gather, packed, shard)
    rest_RN, inner_RN = parts_RNC[..., -2], parts_RNC[..., -1]
    rest_N = torch.logsumexp(rest_RN, dim=0)
    share = torch.where(rest_RN > -torch.inf, rest_RN - rest_N, -torch.inf)
    present = share > -torch.inf
    # Blanked before the arithmetic: 0 · inf is NaN, in the backward pass too.
    safe = torch.where(present, share, 0.0)
    inner_N = torch.where(present, safe.exp() * (inner_RN - safe), 0.0).sum(0)
    ids_NF, logits_NF = local.found_ids_NF, local.found_NF
    if ids_NF.shape[1]:
        ids_RNF = _all_gather(torch.where(ids_NF >= 0, ids_NF + shard.start, -1), shard.group)
        found_RNF = _applied(_Gather, logits_NF, shard)
        ids_NF, logits_NF = (x.movedim(0, 1).flatten(1) for x in (ids_RNF, found_RNF))
    return local._replace(
        given_NC=parts_RNC[..., :-2].sum(0), found_ids_NF=ids_NF, found_NF=logits_NF, rest_N=rest_N, inner_N=inner_N
    )


def summed(x: Tensor, shard: VocabShard) -> Tensor:
    """Returns the sum over ranks. All ranks compute the same loss of it, so its gradient is each rank's own."""
    return _applied(_Sum, x, shard)


def summed_gradient(x: Tensor, shard: VocabShard) -> Tensor:
    """Returns `x`; the backward pass sums its gradient over ranks."""
    return _applied(_SumGradient, x, shard)


def _applied(function: Any, x: Tensor, shard: VocabShard) -> Tensor:
    """Returns `function.apply(x, group)`, with the type that torch does not declare."""
    return function.apply(x, shard.group)


class _Sum(torch.autograd.Function):
    """Sum over ranks, whose gradient is passed on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0], None


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over ranks, because each rank sees only its part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # Summed in float32 or better.
        wide = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=ctx.group)
        return wide.to(grads[0].dtype), None


class _Gather(torch.autograd.Function):
    """All-gather: [...] → [ranks, ...]. All ranks compute the same loss, so a rank's gradient is its slice of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.rank = dist.get_rank(group)
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0][ctx.rank], None


def _all_gather(x: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    out = x.new_empty((ranks, *x.shape))
    flat = out.view(ranks * x.shape[0], *x.shape[1:])
    # Newer releases deprecate this name, but all supported ones have it.
    dist.all_gather_into_tensor(flat, x.contiguous(), group=group)  # pyright: ignore[reportDeprecated]
    return out
