r"""Divergences computed from the sampled token alone.

All arguments are log-probs of the sampled token a. Probabilities are computed in float64. The anchor b is the second
argument and comes first in the divergence: D(b‖π). r = π/b.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.core.divergences.interval import Interval, point
from trustrl.core.numerics import kl_term, log1mexp, verdict_dtype


def ratio_gap(policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"]) -> Interval:
    r"""Returns PPO's statistic, D = |r − 1|. It does not bound a divergence: r = 3 may mean 2e-4 or 0.6."""
    return point(torch.expm1(_log_ratio(policy_logp, anchor_logp)).abs())


def binary_tv(policy_logp: Float[Tensor, "*batch"], anchor_logp: Float[Tensor, "*batch"]) -> Interval:
    r"""Returns the TV between "the sampled token" and "any other token".

        D = |b − π| ≤ TV ≤ 1 − min(b, π)

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 13.

    Example:
        >>> binary_tv(torch.tensor(0.7).log(), torch.tensor(0.4).log()).lower
        tensor(0.3000, dtype=torch.float64)
    """
    policy, anchor = (_probability(x) for x in (policy_logp, anchor_logp))
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


def _double(x: Tensor) -> Tensor:
    return x.to(verdict_dtype(x))


def _probability(logp: Tensor) -> Tensor:
    return torch.exp(_double(logp)).clamp(max=1.0)


def _log_ratio(policy_logp: Tensor, anchor_logp: Tensor) -> Tensor:
    return _double(policy_logp) - _double(anchor_logp)
