"""Regions that decide on whole sequences by means, products, maxima and prefix budgets: GSPO, GMPO, OPSM and others."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Direction, PrefixBudget
from trustrl.config.sequence_regions import CPPO, GMPO, GSPO, OPSM, TRM, VESPO
from trustrl.config.statistics import SequenceRatio, Statistic, TopKTV
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.measure import acting_end, each_end, measure
from trustrl.core.numerics import either, largest_exponent
from trustrl.core.regions.decision import Decision, corrected, weighted
from trustrl.core.regions.dppo import mask_by, mask_tokens
from trustrl.core.regions.ppo import truncate
from trustrl.core.sequences import (
    SPENT,
    Sequences,
    prefix_sum,
    sequence_length,
    sequence_max,
    sequence_mean,
    sequence_quantile,
    sequence_total,
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


def decide_gmpo(tokens: CleanTokens, region: GMPO) -> Decision:
    r"""Clips each log-ratio on the side that the update pushes it to, and weights the sequence by their geometric mean.

        objective = A·s,   s = exp(mean_t c_t),   c_t = log r_t clipped to the bound if A pushes it outward
        ∂/∂log π_t = A·s/T where log r_t is inside its bound, else 0

    Reference: Geometric-Mean Policy Optimization, arXiv:2507.20673, eq. 4.
    """
    decision = mask_tokens(tokens, region.log_ratio)
    max_decrease, max_increase = region.log_ratio.bounds
    edge = either(tokens.log_ratio > 0, max_increase, -max_decrease, like=tokens.log_ratio)
    clipped = torch.where(decision.keep, tokens.log_ratio, edge)
    weight = torch.exp(sequence_mean(clipped, tokens.counted, tokens.grouped))
    return corrected(tokens, region.correction, replace(decision, weight=weight, value=weight * tokens.advantage))


def decide_opsm(tokens: CleanTokens, region: OPSM) -> Decision:
    r"""Drops sequences with A < 0 whose mean of log μ − log π exceeds δ, and masks single tokens of the others.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    log_ratio = tokens.log_ratio
    if region.anchor == "proximal":
        assert tokens.log_mismatch is not None  # the region's needs include both anchors
        log_ratio = log_ratio + tokens.log_mismatch
    drift = -sequence_mean(log_ratio, tokens.counted, tokens.grouped)
    dropped = (tokens.advantage < 0) & (drift > region.max_drift)
    statistic = region.statistic
    decision = truncate(tokens, max_ratio=None) if statistic is None else mask_tokens(tokens, statistic)
    decision = replace(decision, keep=decision.keep & ~dropped, extra={**decision.extra, "sequence_dropped": dropped})
    return corrected(tokens, region.correction, decision)


def decide_vespo(tokens: CleanTokens, region: VESPO) -> Decision:
    r"""Weights every token by a smooth function of the product of its sequence's ratios, and masks nothing.

        φ(w) = w^k exp(λ(1 − w)),   w = Π_t r_t,   k and λ by the sign of A

    φ(1) = 1, and φ goes to 0 where w is small or large. Computed in logs: w may overflow where φ is 0.

    Reference: VESPO, arXiv:2602.10693.
    """
    log_w = sequence_total(tokens.log_ratio, tokens.counted, tokens.grouped)
    rises = tokens.advantage >= 0
    power = either(rises, region.power_positive, region.power_negative, like=log_w)
    decay = either(rises, region.decay_positive, region.decay_negative, like=log_w)
    excess = torch.expm1(log_w.clamp(max=largest_exponent(log_w.dtype)))
    decision = truncate(tokens, max_ratio=None)
    return replace(decision, weight=torch.exp(power * log_w - decay * excess))


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
