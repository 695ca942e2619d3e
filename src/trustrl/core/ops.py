"""Operations that regions are written with: distances, masks, weights, and statistics over sequences.

`trustrl.regions.ops` imports these names on first use. A region's `decide` returns a `Decision` for each token;
`trustrl.core.decision` applies the rules that hold for all regions around it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, ones_like as ones_like, where as where, zeros_like as zeros_like
from torch.nn.functional import logsigmoid as logsigmoid

from trustrl.config.axes import Region
from trustrl.config.statistics import Statistic, TopKTV
from trustrl.core import sequences
from trustrl.core.clean import CleanTokens as Tokens, clean_tokens
from trustrl.core.decision import Decision as Decision, bounded_weight as bounded_weight, decide, ratio_weight
from trustrl.core.divergences import Interval, acting_end, each_end, measure, point as point
from trustrl.core.losses import policy_terms
from trustrl.core.numerics import either as either, largest_exponent as largest_exponent
from trustrl.core.partition import CellSums, Partition
from trustrl.core.projection import project_tokens as project_tokens
from trustrl.core.records import PolicyTokens, RolloutTokens, differentiable_once


class Measured(NamedTuple):
    """Distance of each token from the anchor, and the bounds that it is compared with."""

    distance: Float[Tensor, " n"]
    """D: the end of the interval that the bounds apply to, times 1 + age − n at stale tokens if they tighten."""

    bounds: dict[str, float]
    """`max_increase` and `max_decrease`."""

    interval: Interval
    narrows_with_k: bool
    per_token_bounds: dict[str, float | Tensor]
    """The bounds, divided by 1 + age − n at stale tokens if they tighten."""


def measured(
    tokens: Tokens,
    statistic: Statistic,
    interval: Interval | None = None,
    *,
    over: Callable[[Tokens, Tensor], Tensor] | None = None,
) -> Measured:
    """Measures a statistic on each token.

    Args:
        tokens: Clean tokens.
        statistic: Statistic with its bounds.
        interval: The distance, if it is already measured.
        over: Summary of the distance over each sequence, such as `sequence_max`.
    """
    interval = measure(tokens, statistic) if interval is None else interval
    if over is not None:
        interval = each_end(interval, lambda end: over(tokens, end))
    distance = acting_end(interval, statistic)
    max_decrease, max_increase = statistic.bounds
    bounds = {"max_increase": max_increase, "max_decrease": max_decrease}
    per_token: dict[str, float | Tensor] = {**bounds}
    if tokens.tightening is not None:
        # A factor on D is a divisor of δ, and 1 leaves fresh tokens as they are.
        distance = distance * tokens.tightening
        per_token = {name: bound / tokens.tightening for name, bound in bounds.items()}
    return Measured(distance, bounds, interval, isinstance(statistic, TopKTV), per_token)


def masked(
    tokens: Tokens,
    mask: Bool[Tensor, " n"] | None = None,
    by: Measured | None = None,
    *,
    max_ratio: float | None = None,
    log_weight: Float[Tensor, " n"] | None = None,
    value: Float[Tensor, " n"] | None = None,
    side: Float[Tensor, " n"] | None = None,
) -> Decision:
    """Returns the decision that masks some tokens and weights the others by min(w, C).

    Args:
        tokens: Clean tokens.
        mask: True on the tokens to mask; None masks none.
        by: The distance behind the mask, for metrics.
        max_ratio: C; None for no cap.
        log_weight: log w; the token's log-ratio by default.
        value: Value of the objective, if the region maximizes one.
        side: Log-ratio whose sign selected the bound, if it is not the token's own.
    """
    log_weight = tokens.log_ratio if log_weight is None else log_weight
    extra = {} if max_ratio is None else {"capped": log_weight > math.log(max_ratio)}
    keep = keep_all(tokens) if mask is None else ~mask
    weight = ratio_weight(log_weight, max_ratio=max_ratio)
    decision = Decision(keep, weight, tokens.logp, value=value, side=side, extra=extra)
    if by is None:
        return decision
    return replace(decision, divergence=by.interval, narrows_with_k=by.narrows_with_k, **by.per_token_bounds)


def keep_all(tokens: Tokens) -> Bool[Tensor, " n"]:
    """Returns a mask that keeps every token."""
    return torch.ones_like(tokens.usable)


def pushed_outward(log_ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Flags tokens that the update pushes further away from the anchor: A(r − 1) > 0."""
    return ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))


def probability_gap(tokens: Tokens) -> Float[Tensor, " n"]:
    """Returns π − b of the sampled token."""
    return torch.exp(tokens.log_policy) - torch.exp(tokens.log_anchor)


def cells(tokens: Tokens) -> Partition:
    """Returns the recorded columns of each token, which the region's needs asked for."""
    partition = tokens.partition
    if isinstance(partition, CellSums):
        partition = partition.spread(tokens.logp, tokens.usable)
    assert partition is not None
    return partition


def smallest(like: Tensor) -> float:
    """Returns the smallest positive number of the dtype with full precision."""
    return torch.finfo(like.dtype).tiny


def sequence_mean(tokens: Tokens, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns, for each token, the mean of x over its sequence."""
    return sequences.sequence_mean(x, tokens.counted, tokens.grouped)


def sequence_max(tokens: Tokens, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns, for each token, the maximum of x ≥ 0 over its sequence."""
    return sequences.sequence_max(x, tokens.counted, tokens.grouped)


def sequence_total(tokens: Tokens, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns, for each token, the sum of x over its sequence."""
    return sequences.sequence_total(x, tokens.counted, tokens.grouped)


def sequence_quantile(tokens: Tokens, x: Float[Tensor, " n"], *, share: float) -> Float[Tensor, " n"]:
    """Returns, for each token, a quantile of x over its sequence."""
    return sequences.sequence_quantile(x, tokens.counted, tokens.grouped, share=share)


def sequence_length(tokens: Tokens, like: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns, for each token, the number of tokens of its sequence, in the dtype of `like`."""
    grouped = tokens.grouped
    return sequences.sequence_length(tokens.counted, grouped, like)[grouped.of_token]


def sum_before(tokens: Tokens, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns, for each token, the sum of x over the tokens before it in its sequence."""
    return sequences.prefix_sum(x, tokens.counted, tokens.grouped)


def finite(divergence: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns a divergence with a finite stand-in for infinity, for running sums."""
    return divergence.clamp(max=sequences.SPENT)


def loss(
    region: Region,
    logp: Float[Tensor, "*batch"],
    anchor_logp: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "..."],
    in_loss: Bool[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    """Returns a region's loss for each token from the log-probs of the sampled tokens."""
    rollout = RolloutTokens(behavior_logp=anchor_logp, advantage=advantage, in_loss=in_loss)
    return loss_of_records(region, PolicyTokens(logp=logp), rollout)


def loss_of_records(region: Region, policy: PolicyTokens, rollout: RolloutTokens) -> Float[Tensor, "*batch"]:
    """Returns a region's loss for each token: clean, decide, −sg(M w A) log π."""
    tokens = clean_tokens(differentiable_once(policy), rollout, region.needs())
    return policy_terms(decide(tokens, region), tokens).value.reshape(rollout.in_loss.shape)
