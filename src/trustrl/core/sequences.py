"""Statistics over whole sequences: sums, means, maxima, quantiles and running sums.

Tokens outside the loss count in no statistic. Sums run in float64, so the difference of two running sums over a million
tokens keeps its precision.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.core.records import RolloutTokens

SPENT = 1e4
"""Finite stand-in for an infinite divergence in running sums, where inf − inf would be NaN."""


class Sequences(NamedTuple):
    """Assignment of flat tokens to sequences."""

    of_token: Int[Tensor, " n"]
    """Sequence number in [0, num) of each token."""

    num: int
    """Upper bound on the number of sequences, known without reading the data."""

    order: Int[Tensor, " n"] | None
    """Permutation that makes each sequence's tokens adjacent and keeps their order; None if they already are."""


def rows_as_sequences(rollout: RolloutTokens) -> int | None:
    """Returns the number of rows if each row is a sequence, else None."""
    return rollout.in_loss.shape[0] if rollout.in_loss.ndim == 2 and rollout.sequence_ids is None else None


def sequences_of(rollout: RolloutTokens) -> Sequences | None:
    """Returns how the flat tokens group into sequences, or None for packed tokens without `sequence_ids`."""
    mask, ids = rollout.in_loss, rollout.sequence_ids
    if ids is None:
        if mask.ndim == 1:
            return None
        rows, width = mask.shape
        index = torch.arange(rows, device=mask.device).unsqueeze(1).expand(rows, width).reshape(-1)
        return Sequences(index, rows, None)
    ids = ids.reshape(-1)
    ordered, order = ids.sort(stable=True)
    starts = torch.zeros_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).to(starts.dtype)
    index = torch.zeros_like(order).scatter(0, order, starts.cumsum(0))
    return Sequences(index, ids.shape[0], order)


def sequence_sum(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " num"]:
    """Returns Σ x over the counted tokens of each sequence."""
    return x.new_zeros(sequences.num).index_add(0, sequences.of_token, torch.where(counted, x, 0.0))


def sequence_length(
    counted: Bool[Tensor, " n"], sequences: Sequences, like: Float[Tensor, " n"]
) -> Float[Tensor, " num"]:
    """Returns the number of counted tokens of each sequence, in the dtype of `like`."""
    return sequence_sum(torch.ones_like(like), counted, sequences)


def sequence_total(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Returns, for each token, Σ x over the counted tokens of its sequence."""
    return sequence_sum(x, counted, sequences)[sequences.of_token]


def sequence_mean(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Returns, for each token, the mean of x over its sequence; 0 where no token counts."""
    length = sequence_length(counted, sequences, x).clamp(min=1.0)
    return (sequence_sum(x, counted, sequences) / length)[sequences.of_token]


def sequence_max(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Returns, for each token, the maximum of x ≥ 0 over its sequence; 0 where no token counts."""
    top = x.new_zeros(sequences.num).scatter_reduce(0, sequences.of_token, torch.where(counted, x, 0.0), "amax")
    return top[sequences.of_token]


def prefix_sum(x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences) -> Float[Tensor, " n"]:
    """Returns, for each token, Σ x over the counted tokens before it in its sequence."""
    x = torch.where(counted, x, 0.0)
    order = sequences.order
    ordered = x if order is None else x[order]
    of_token = sequences.of_token if order is None else sequences.of_token[order]
    running = ordered.cumsum(0) - ordered
    # Each sequence subtracts its own first running sum: both values hold the same rounding, which cancels.
    sums = running - running[first_token(sequences, x)[of_token]]
    return sums if order is None else torch.zeros_like(x).scatter(0, order, sums)


def first_token(sequences: Sequences, like: Float[Tensor, " n"]) -> Int[Tensor, " num"]:
    """Returns the index of each sequence's first token after tokens are ordered by sequence."""
    size = sequence_length(torch.ones_like(like, dtype=torch.bool), sequences, like)
    return (size.cumsum(0) - size).long().clamp(max=max(like.shape[0] - 1, 0))


def sequence_quantile(
    x: Float[Tensor, " n"], counted: Bool[Tensor, " n"], sequences: Sequences, *, share: float
) -> Float[Tensor, " n"]:
    """Returns, for each token, the quantile of x over its sequence; 0 where no token counts.

    Interpolates linearly between order statistics.
    """
    if not x.shape[0]:
        return x
    x = x.clamp(max=SPENT)
    by_value = torch.where(counted, x, torch.inf).sort(stable=True).indices  # tokens that do not count go last
    by_sequence = by_value[sequences.of_token[by_value].sort(stable=True).indices]
    ordered = torch.where(counted, x, 0.0)[by_sequence]
    start = first_token(sequences, x)
    length = sequence_length(counted, sequences, x)
    place = share * (length - 1).clamp(min=0.0)
    low, high = (ordered[start + rank.long()] for rank in (place.floor(), place.ceil()))
    quantile = torch.where(length > 0, low + (place - place.floor()) * (high - low), 0.0)
    return quantile[sequences.of_token]
