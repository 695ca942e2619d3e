"""Verdicts that look at a whole sequence: means, maxima and CPPO's prefix budget.

Tokens outside the loss count in no mean, position or budget. Sums run in float64, so that a difference of two running
sums over a million tokens still means something.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.tokens import Sequences

SPENT = 1e4
"""An infinite divergence spends any budget, but must not reach a running sum: inf − inf is NaN from there on."""


def sequence_sum(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " num"]:
    """Σ of x over each sequence's counted tokens."""
    return x.new_zeros(sequences.num).index_add(0, sequences.of_token, torch.where(counted, x, 0.0))


def sequence_length(
    counted: Bool[Tensor, " n"], sequences: Sequences, like: Float[Tensor, " n"]
) -> Float[Tensor, " num"]:
    """How many tokens of each sequence count."""
    return sequence_sum(torch.ones_like(like), counted, sequences)


def sequence_mean(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Each token's sequence mean of x; 0 where nothing counts."""
    length = sequence_length(counted, sequences, x).clamp(min=1.0)
    return (sequence_sum(x, counted, sequences) / length)[sequences.of_token]


def sequence_max(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Each token's sequence maximum of x ≥ 0; 0 where nothing counts."""
    top = x.new_zeros(sequences.num).scatter_reduce(0, sequences.of_token, torch.where(counted, x, 0.0), "amax")
    return top[sequences.of_token]


def overspent(
    divergence: Float[Tensor, " n"],
    log_ratio: Float[Tensor, " n"],
    advantage: Float[Tensor, " n"],
    counted: Bool[Tensor, " n"],
    sequences: Sequences,
    *,
    bound: float,
    rate: Float[Tensor, " n"] | float,
    last_weight: float,
) -> Bool[Tensor, " n"]:
    r"""CPPO's stop: pushed outwards, and more than the response's budget has left.

        w_t = 1 − (1 − w_min)(t − 1)/max(T − 1, 1),   Z = w D,   S and W the running sums of Z and w
        stop iff A(r − 1) > 0 and Z_t > min(δ, δ + δ_b W_{t−1} − S_{t−1})

    Positions t = 1..T and sums run over all counted tokens, stopped or not.

    Reference: arXiv:2606.10968, eq. 8-10.
    """
    divergence = divergence.clamp(max=SPENT)
    position = prefix_sum(torch.ones_like(divergence), counted, sequences)  # t − 1
    last = (sequence_length(counted, sequences, divergence)[sequences.of_token] - 1).clamp(min=1.0)
    weight = 1 - (1 - last_weight) * position / last
    cost = weight * divergence
    budget = bound + rate * prefix_sum(weight, counted, sequences) - prefix_sum(cost, counted, sequences)
    outwards = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    return outwards & (cost > budget.clamp(max=bound))


def prefix_sum(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Σ of x over the counted tokens before this one in its sequence."""
    x = torch.where(counted, x, 0.0)
    order = sequences.order
    ordered = x if order is None else x[order]
    of_token = sequences.of_token if order is None else sequences.of_token[order]
    running = ordered.cumsum(0) - ordered
    # Each sequence starts at its own first running sum: two values of one sum, so what rounding it holds cancels.
    found = running - running[first_token(sequences, x)[of_token]]
    return found if order is None else torch.zeros_like(x).scatter(0, order, found)


def first_token(sequences: Sequences, like: Float[Tensor, " n"]) -> Int[Tensor, " num"]:
    """Where each sequence begins once its tokens stand side by side."""
    size = sequence_length(torch.ones_like(like, dtype=torch.bool), sequences, like)
    return (size.cumsum(0) - size).long().clamp(max=max(like.shape[0] - 1, 0))


def sequence_quantile(
    x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences, *, share: float
) -> Float[Tensor, " n"]:
    """Each token's sequence quantile of x, interpolated linearly between order statistics; 0 where nothing counts."""
    if not x.shape[0]:
        return x
    x = x.clamp(max=SPENT)
    by_value = torch.where(counted, x, torch.inf).sort(stable=True).indices  # what does not count goes last
    by_sequence = by_value[sequences.of_token[by_value].sort(stable=True).indices]
    ordered = torch.where(counted, x, 0.0)[by_sequence]
    start = first_token(sequences, x)
    length = sequence_length(counted, sequences, x)
    place = share * (length - 1).clamp(min=0.0)
    low, high = (ordered[start + at.long()] for at in (place.floor(), place.ceil()))
    found = torch.where(length > 0, low + (place - place.floor()) * (high - low), 0.0)
    return found[sequences.of_token]
