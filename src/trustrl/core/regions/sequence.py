"""Regions that decide on whole sequences: GSPO's mean ratio, TRM's maximum, CPPO's prefix budget."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Direction, PrefixBudget
from trustrl.config.sequence_regions import CPPO, GSPO, TRM
from trustrl.config.statistics import SequenceRatio, Statistic, TopKTV
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.measure import acting_end, each_end, measure
from trustrl.core.regions.decision import Decision, corrected, weighted
from trustrl.core.regions.dppo import mask_by
from trustrl.core.sequences import (
    SPENT,
    Sequences,
    prefix_sum,
    sequence_length,
    sequence_max,
    sequence_mean,
    sequence_quantile,
)


def mask_sequences(
    tokens: CleanTokens,
    statistic: Statistic,
    level: Literal["sequence", "sequence-max"],
    *,
    direction: Direction = "away",
    max_ratio: float | None = None,
) -> Decision:
    """Returns the decision that masks whole sequences by the mean or the maximum of a statistic.

    The sign of the sequence's mean log-ratio selects the bound. With `SequenceRatio` that mean is the weight too.
    """
    side = sequence_mean(tokens.log_ratio, tokens.counted, tokens.grouped)
    interval = measure(tokens, statistic)
    log_weight = tokens.log_ratio
    if isinstance(statistic, SequenceRatio):
        log_weight = side
    else:
        over = sequence_mean if level == "sequence" else sequence_max
        interval = each_end(interval, lambda end: over(end, tokens.counted, tokens.grouped))
    return mask_by(
        tokens, interval, statistic, direction=direction, max_ratio=max_ratio, side=side, log_weight=log_weight
    )


def decide_gspo(tokens: CleanTokens, region: GSPO) -> Decision:
    r"""Masks and weights a sequence by the geometric mean of its ratios, s = exp(mean log r).

    Reference: Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    return corrected(tokens, region.correction, mask_sequences(tokens, region.ratio, "sequence"))


def decide_trm(tokens: CleanTokens, region: TRM) -> Decision:
    """Masks whole sequences by the maximum of D and, if `mean` is set, by its mean.

    Reference: Trust Region Masking, arXiv:2512.23075.
    """
    decision = mask_sequences(
        tokens, region.statistic, "sequence-max", direction="symmetric", max_ratio=region.max_ratio
    )
    decision = corrected(tokens, region.correction, decision)
    if region.mean is None:
        return decision
    by_mean = mask_sequences(tokens, region.mean, "sequence", direction="symmetric")
    return replace(decision, keep=decision.keep & by_mean.keep)


def overspent(
    divergence: Float[Tensor, " n"],
    outward: Bool[Tensor, " n"],
    counted: Bool[Tensor, " n"],
    sequences: Sequences,
    *,
    bound: float,
    rate: Float[Tensor, " n"] | float,
    last_weight: float,
) -> Bool[Tensor, " n"]:
    r"""Flags tokens that the update pushes outward and that cost more than the response's remaining budget.

        w_t = 1 − (1 − w_min)(t − 1)/max(T − 1, 1),   Z = w D,   S and W the running sums of Z and w
        masked iff the update pushes the token outward and Z_t > min(δ, δ + δ_b W_{t−1} − S_{t−1})

    Positions t = 1..T and both sums run over all counted tokens, masked or not.

    Reference: arXiv:2606.10968, eq. 8-10.
    """
    divergence = divergence.clamp(max=SPENT)
    position = prefix_sum(torch.ones_like(divergence), counted, sequences)  # t − 1
    last = (sequence_length(counted, sequences, divergence)[sequences.of_token] - 1).clamp(min=1.0)
    weight = 1 - (1 - last_weight) * position / last
    cost = weight * divergence
    budget = bound + rate * prefix_sum(weight, counted, sequences) - prefix_sum(cost, counted, sequences)
    return outward & (cost > budget.clamp(max=bound))


def pushed_outward(log_ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Flags tokens that the update pushes further away from the anchor: A(r − 1) > 0."""
    return ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))


def mask_prefixes(
    tokens: CleanTokens, statistic: Statistic, budget: PrefixBudget, *, max_ratio: float | None = None
) -> Decision:
    """Returns the decision that masks tokens once their response has spent its divergence budget."""
    interval = measure(tokens, statistic)
    distance, sequences = acting_end(interval, statistic), tokens.grouped
    max_decrease, max_increase = statistic.bounds
    rate = budget.rate
    if rate == "p90":
        rate = sequence_quantile(distance, tokens.counted, sequences, share=0.9)
        rate = rate.clamp(budget.rate_low, budget.rate_high)
    masked = overspent(
        distance,
        pushed_outward(tokens.log_ratio, tokens.advantage),
        tokens.counted,
        sequences,
        bound=max_increase,
        rate=rate,
        last_weight=budget.last_weight,
    )
    decision = weighted(tokens, masked, tokens.log_ratio, max_ratio)
    bounds = {"max_increase": max_increase, "max_decrease": max_decrease}
    return replace(decision, divergence=interval, narrows_with_k=isinstance(statistic, TopKTV), **bounds)


def decide_cppo(tokens: CleanTokens, region: CPPO) -> Decision:
    """Masks tokens once their response has spent its divergence budget (eq. 8-10)."""
    decision = mask_prefixes(tokens, region.divergence, region.budget, max_ratio=region.max_ratio)
    return corrected(tokens, region.correction, decision)
