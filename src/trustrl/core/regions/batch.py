r"""M2PO: a mask from the statistics of all tokens in one call.

    T = {t : A_t (r_t − 1) > 0}.  Remove the largest log² r from T until its mean over T is at most τ.
    M_t = 0 on the tokens removed.

The rule keeps the most tokens that fulfil the bound. If a batch is split over micro-batches or ranks, each part fulfils
the bound, so the whole does; the parts together mask at least as many tokens as the whole would.

Reference: Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, arXiv:2510.01161,
algorithm 1.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.regions import M2PO
from trustrl.core.clean import CleanTokens
from trustrl.core.regions.decision import Decision, corrected, weighted
from trustrl.core.regions.sequence import pushed_outward


def beyond_moment(x: Float[Tensor, " n"], among: Bool[Tensor, " n"], *, bound: float) -> Bool[Tensor, " n"]:
    """Flags the largest x ≥ 0 that must be removed so that the mean of the others is at most the bound."""
    x = torch.where(among, x, torch.inf)
    order = x.argsort(stable=True)
    ordered = x[order]
    means = torch.where(ordered < torch.inf, ordered, 0.0).cumsum(0) / torch.ones_like(x).cumsum(0)
    return torch.zeros_like(among).scatter(0, order, means > bound) & among


def decide_m2po(tokens: CleanTokens, region: M2PO) -> Decision:
    """Masks the tokens with the largest log² r among those that the update pushes outward."""
    outward = tokens.usable & pushed_outward(tokens.log_ratio, tokens.advantage)
    masked = beyond_moment(tokens.log_ratio.square(), outward, bound=region.max_second_moment)
    return corrected(tokens, region.correction, weighted(tokens, masked, tokens.log_ratio, None))
