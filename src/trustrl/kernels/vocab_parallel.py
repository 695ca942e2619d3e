"""A head sharded over ranks: every rank streams its own part of the vocabulary, and only cells cross the wire.

Per token and rank, forward: one all-gather of 4 (K + 3) bytes (the K + 1 given logits, the rest's log-sum-exp and
entropy), 12 bytes more per id of `top_k`, 8 for exact divergences. Backward: one all-reduce of the hidden states'
gradient, as any column-parallel layer has. No collective ever carries logits.

Every rank must call with the same hidden states and ids, and use the results in the same loss.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trustrl.kernels.cells import GivenIds, Known


class VocabShard(NamedTuple):
    """Which part of the vocabulary this rank's head holds."""

    group: Any
    """The process group the head is sharded over; None is the default group."""

    start: int
    """The id of the head's first row."""

    reduce_hidden_gradient: bool = True
    """False where the engine adds the ranks' gradients of the hidden states itself (sequence parallel)."""


def local_ids(given: GivenIds, shard: VocabShard, size: int) -> tuple[Tensor, Tensor]:
    """(ids within this rank's part, whether they are in it); an id of another rank is read at 0."""
    ids_NC = given.ids_NC - shard.start
    inside_NC = (ids_NC >= 0) & (ids_NC < size)
    return torch.where(inside_NC, ids_NC, 0), inside_NC


def merge(shard: VocabShard, inside_NC: Tensor, local: Known) -> Known:
    """The whole vocabulary's `Known`, the same on every rank."""
    own_NC = torch.where(inside_NC, local.given_NC, 0.0)
    packed = torch.cat([own_NC, local.rest_N.unsqueeze(-1), local.inner_N.unsqueeze(-1)], dim=-1)
    parts_RNC = _Gather.apply(packed, shard.group)
    rest_RN, inner_RN = parts_RNC[..., -2], parts_RNC[..., -1]
    rest_N = torch.logsumexp(rest_RN, dim=0)
    share = torch.where(rest_RN > -torch.inf, rest_RN - rest_N, -torch.inf)
    there = share > -torch.inf
    safe = torch.where(there, share, 0.0)
    inner_N = torch.where(there, safe.exp() * (inner_RN - safe), 0.0).sum(0)
    found_ids, found = local.found_ids_NF, local.found_NF
    if found_ids.shape[1]:
        ids_RNF = _all_gather(torch.where(found_ids >= 0, found_ids + shard.start, -1), shard.group)
        found_RNF = _Gather.apply(found, shard.group)
        found_ids, found = (x.movedim(0, 1).flatten(1) for x in (ids_RNF, found_RNF))
    return local._replace(
        given_NC=parts_RNC[..., :-2].sum(0), found_ids_NF=found_ids, found_NF=found, rest_N=rest_N, inner_N=inner_N
    )


def sum_over_ranks(x: Tensor, shard: VocabShard | None) -> Tensor:
    """Adds the ranks' parts; no gradient."""
    if shard is None:
        return x
    x = x.contiguous()
    dist.all_reduce(x, group=shard.group)
    return x


class SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks: each has seen its part of the vocabulary only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """The same values."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The sum, in float32 or better."""
        wide = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=ctx.group)
        return wide.to(grads[0].dtype), None


class _Gather(torch.autograd.Function):
    """[...] → [ranks, ...]. Every rank computes the same loss, so the gradient is the rank's own slice of it."""

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
    dist.all_gather_into_tensor(out.view(ranks * x.shape[0], *x.shape[1:]), x.contiguous(), group=group)
    return out
