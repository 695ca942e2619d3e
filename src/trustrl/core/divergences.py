r"""Divergences between two policies at a token, as intervals that contain the exact value.

From the sampled token alone (π and b are its probabilities, r = π/b), over the anchor's top K, or over the whole
vocabulary. Probabilities are computed in float64. The anchor b is the second argument and comes first in the
divergence: D(b‖π).

Top-K: S = TopK(b, K) ∪ {a}, tails m = 1 − b(S) and p = 1 − π(S), K + 2 exponentials on each side for each token.
Merging cells can only lose divergence, so these lie between the binary and the full divergences. TV also has a
certified upper end.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config import statistics
from trustrl.config.statistics import Divergence, FullKL, FullTV, Statistic, TopKTV
from trustrl.core.clean import CleanTokens
from trustrl.core.numerics import kl_term, log1mexp, verdict_dtype
from trustrl.core.partition import CellSums, Partition
from trustrl.core.sequences import sequence_mean
from trustrl.errors import ConfigError, MissingDataError

__all__ = [
    "Interval", "binary_kl", "binary_tv", "full_kl", "full_tv", "k1", "k2", "k3", "point", "ratio_gap",
    "symmetric_binary_kl", "topk_kl", "topk_tv", "tv_limit",
]  # fmt: skip


class Interval(NamedTuple):
    """lower ≤ exact divergence ≤ upper, per token."""

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]


def point(value: Float[Tensor, "*batch"]) -> Interval:
    """Returns an interval of width 0, for a quantity that is known exactly."""
    return Interval(value, value)


def tv_limit(kl: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns the largest TV of two distributions with this KL, in either direction.

        TV ≤ min( √(KL/2), √(1 − e^−KL) )

    The first inequality is Pinsker's, the smaller one up to KL = 1.59; the second is Bretagnolle and Huber's.

    Example:
        >>> tv_limit(torch.tensor(0.02))
        tensor(0.1000)
    """
    return torch.minimum(kl / 2, -torch.expm1(-kl)).sqrt()


def ratio_gap(policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"]) -> Interval:
    r"""Returns PPO's statistic, D = |r − 1|. It does not bound a divergence: r = 3 may mean 2e-4 or 0.6."""
    return point(torch.expm1(_double(policy_logp) - _double(anchor_logp)).abs())


def binary_tv(policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"]) -> Interval:
    r"""Returns the TV between "the sampled token" and "any other token".

        D = |b − π| ≤ TV ≤ 1 − min(b, π)

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 13.

    Example:
        >>> binary_tv(torch.tensor(0.7).log(), torch.tensor(0.4).log()).lower
        tensor(0.3000, dtype=torch.float64)
    """
    policy, anchor = (torch.exp(_double(x)).clamp(max=1.0) for x in (policy_logp, anchor_logp))
    return Interval((anchor - policy).abs(), 1 - torch.minimum(anchor, policy))


def binary_kl(
    policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"], *, resolution: float = 0.0
) -> Interval:
    r"""Returns the KL between "the sampled token" and "any other token", anchor first.

        D = b log(b/π) + (1−b) log((1−b)/(1−π)) ≤ KL(b‖π)

    A lower bound on the full KL (data processing: it merges all other tokens). The upper end is +inf unless b = 1.
    Exactly 0 where the two agree, +inf where π is 0 or 1 and b is not.

    A float32 log-prob is exactly 0 if the remaining mass is below 1e-7. Taken literally, a token that goes from nearly
    certain to that has moved infinitely far. With `resolution`, the remaining mass is never less than it.

    Args:
        policy_logp: log π.
        anchor_logp: log b.
        resolution: Smallest 1 − π and 1 − b that the log-probs can express; 0 if they are exact.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 14.
    """
    policy, anchor = _own_and_rest(policy_logp, anchor_logp, resolution)
    lower = kl_term(anchor, policy).sum(0).clamp(min=0.0)
    return Interval(lower, lower.masked_fill(anchor[0] < 0, torch.inf))


def _own_and_rest(policy_logp: Tensor, anchor_logp: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """Returns, for π and for b, the logs of both probabilities: the sampled token's and any other's."""
    own = torch.stack([_double(policy_logp), _double(anchor_logp)]).clamp(max=0.0)
    rest = log1mexp(own).clamp(min=math.log(resolution) if resolution else -math.inf)
    both = torch.stack([own, rest], dim=1)
    return both[0], both[1]


def symmetric_binary_kl(
    policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"], *, resolution: float = 0.0
) -> Interval:
    """Returns max(KL_bin(b‖π), KL_bin(π‖b)), a lower bound on the larger of the two full KLs."""
    policy, anchor = _own_and_rest(policy_logp, anchor_logp, resolution)
    both = torch.stack([anchor, policy]), torch.stack([policy, anchor])
    lower = kl_term(*both).sum(1).clamp(min=0.0).amax(0)
    return Interval(lower, lower.masked_fill((anchor[0] < 0) | (policy[0] < 0), torch.inf))


def k1(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns −log r. With a ~ b and r = π/b it is unbiased for KL(b‖π), of either sign, and noisy."""
    return -log_ratio


def k2(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns ½ log² r: never negative, biased, and equal to KL to second order."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Returns r − 1 − log r: never negative and, with a ~ b and r = π/b, unbiased for KL(b‖π)."""
    return torch.expm1(log_ratio) - log_ratio


def topk_tv(
    partition: Partition | CellSums, log_policy: Float[Tensor, " n"], log_anchor: Float[Tensor, " n"]
) -> Interval:
    r"""Returns the total variation with its certified interval.

        ½(Σ_S |b−π| + |m−p|) ≤ TV ≤ ½(Σ_S |b−π| + m + p),   width = min(m, p)

    Args:
        partition: The known ids other than the sampled one, and the tails.
        log_policy: log π of the sampled token.
        log_anchor: log b of the sampled token.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 15 (the lower end).
    """
    on_token = (torch.exp(log_anchor) - torch.exp(log_policy)).abs()
    on_cells = on_token + partition.tv()
    m, p = partition.anchor_tail, partition.policy_tail.detach()
    lower, upper = 0.5 * (on_cells + (m - p).abs()), 0.5 * (on_cells + m + p)
    return Interval(lower.clamp(max=1.0), upper.clamp(max=1.0))


def topk_kl(
    partition: Partition | CellSums, log_policy: Float[Tensor, " n"], log_anchor: Float[Tensor, " n"]
) -> Interval:
    r"""Returns KL(b‖π) over the cells, a lower bound. The upper end is finite only if the anchor has no tail.

        D = Σ_S b log(b/π) + m log(m/p);   m = 0 ⇒ the tail's term is 0,   m > 0 = p ⇒ +inf

    A tail computed as 1 − Σ is accurate only to the rounding of its summands. p is raised to that resolution, because
    rounding alone would otherwise make the divergence infinite where almost no mass is outside.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 16.
    """
    m, p = partition.anchor_tail, partition.policy_tail.detach()
    p = torch.where(m > 0, p.clamp(min=partition.resolution), p)
    on_cells = kl_term(log_anchor, log_policy) + partition.kl()
    lower = (on_cells + kl_term(torch.log(m), torch.log(p))).clamp(min=0.0)
    return Interval(lower, torch.where(m > 0, torch.inf, lower))


def full_tv(policy_logp: Float[Tensor, "*batch v"], anchor_logp: Float[Tensor, "*batch v"]) -> Interval:
    """Returns the exact total variation, ½ Σ_v |b(v) − π(v)|.

    Example:
        >>> full_tv(torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()).lower
        tensor(0.3000, dtype=torch.float64)
    """
    policy, anchor = (torch.exp(_double(x)) for x in (policy_logp, anchor_logp))
    return point((0.5 * (anchor - policy).abs().sum(-1)).clamp(max=1.0))


def full_kl(policy_logp: Float[Tensor, "*batch v"], anchor_logp: Float[Tensor, "*batch v"]) -> Interval:
    """Returns the exact KL(b‖π) = Σ_v b(v) log(b(v)/π(v)); +inf where π excludes an id that b allows."""
    policy, anchor = (_double(x) for x in (policy_logp, anchor_logp))
    return point(kl_term(anchor, policy).sum(-1).clamp(min=0.0))


def _double(x: Tensor) -> Tensor:
    return x.to(verdict_dtype(x))


def measure(tokens: CleanTokens, statistic: Statistic) -> Interval:
    """Returns the statistic of each token as an interval."""
    match statistic:
        case statistics.Ratio():
            return ratio_gap(tokens.log_ratio, torch.zeros_like(tokens.log_ratio))
        case statistics.LogRatio():
            return point(tokens.log_ratio.abs())
        case statistics.SequenceRatio():
            return point(torch.expm1(sequence_mean(tokens.log_ratio, tokens.counted, tokens.grouped)).abs())
        case statistics.SampledK2():
            return point(k2(tokens.log_ratio))
        case statistics.SampledK3():
            return point(k3(tokens.log_ratio))
        case statistics.BinaryTV():
            return binary_tv(tokens.log_policy, tokens.log_anchor)
        case statistics.BinaryKL():
            return binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case statistics.SymmetricBinaryKL():
            return symmetric_binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case statistics.TopKTV() | statistics.TopKKL():
            of = topk_tv if isinstance(statistic, TopKTV) else topk_kl
            assert tokens.partition is not None  # among the region's needs
            return _blanked(tokens, of(tokens.partition, tokens.log_policy, tokens.log_anchor))
        case statistics.FullTV() | statistics.FullKL():
            return _blanked(tokens, _full(tokens, statistic))
        case _:
            raise ConfigError(f"Cannot measure {statistic!r}. Use one of trustrl's statistics, or register a region.")


def acting_end(interval: Interval, statistic: Statistic) -> Tensor:
    """Returns the end of the interval that the bound applies to: the lower one unless `act_on="upper"`."""
    return interval.upper if isinstance(statistic, Divergence) and statistic.act_on == "upper" else interval.lower


def each_end(interval: Interval, change: Callable[[Tensor], Tensor]) -> Interval:
    """Applies a function to both ends. A point stays a point."""
    lower = change(interval.lower)
    return Interval(lower, lower if interval.upper is interval.lower else change(interval.upper))


def _full(tokens: CleanTokens, statistic: FullTV | FullKL) -> Interval:
    name = "tv" if isinstance(statistic, FullTV) else "kl"
    if tokens.full_divergence is not None:
        divergence = getattr(tokens.full_divergence, name)
        if divergence is None:
            raise MissingDataError(f"PolicyTokens.full_divergence.{name} must be given for {statistic.kind}, got None.")
        return point(divergence)
    partition = tokens.partition
    assert isinstance(partition, Partition)  # among the region's needs
    return (full_tv if name == "tv" else full_kl)(partition.log_policy.detach(), partition.log_anchor)


def _blanked(tokens: CleanTokens, interval: Interval) -> Interval:
    """Sets the interval to 0 on unusable tokens, whose partition may hold anything."""
    return each_end(interval, lambda end: torch.where(tokens.usable, end, 0.0))
