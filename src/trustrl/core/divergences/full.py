"""Exact divergences over the whole vocabulary. They need [tokens, vocabulary] log-probs."""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.core.divergences.interval import Interval, point
from trustrl.core.numerics import kl_term, verdict_dtype


def full_tv(policy_logp: Float[Tensor, "*batch v"], anchor_logp: Float[Tensor, "*batch v"]) -> Interval:
    """Returns the exact total variation, ½ Σ_v |b(v) − π(v)|.

    Example:
        >>> full_tv(torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()).lower
        tensor(0.3000, dtype=torch.float64)
    """
    policy, anchor = (torch.exp(x.to(verdict_dtype(x))) for x in (policy_logp, anchor_logp))
    return point((0.5 * (anchor - policy).abs().sum(-1)).clamp(max=1.0))


def full_kl(policy_logp: Float[Tensor, "*batch v"], anchor_logp: Float[Tensor, "*batch v"]) -> Interval:
    """Returns the exact KL(b‖π) = Σ_v b(v) log(b(v)/π(v)); +inf where π excludes an id that b allows."""
    policy, anchor = (x.to(verdict_dtype(x)) for x in (policy_logp, anchor_logp))
    return point(kl_term(anchor, policy).sum(-1).clamp(min=0.0))
