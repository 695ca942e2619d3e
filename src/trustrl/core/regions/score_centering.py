r"""Score centering: subtracts the score that the sampler expects from each token's score.

    ℓ = −A·[w(a)·log π(a) − Σ_c sg(b_c w_c)·log π_c],   w = f(π/b),   gradient −A·(w(a)·s(a) − E_b[w s]),   s = ∇log π

The cells c are the K recorded ids and one for all others, whether the sampled token is among them or not: they must not
depend on it. The last cell stands for an anchor that is proportional to the policy outside the K ids. For an advantage
that does not depend on the token, the gradient then has the expectation 0 over cells.

Reference: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv:2609.20807.

Cost per token: one exponential per column and side, two with a weight.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.score_centering import ScoreCentering
from trustrl.config.terms import TIS
from trustrl.core.clean import CleanTokens
from trustrl.core.partition import CellSums, Partition
from trustrl.core.regions.decision import Decision, bounded_weight, corrected


def decide_score_centering(tokens: CleanTokens, region: ScoreCentering) -> Decision:
    r"""Centers each token's score. The weight w is part of the differentiated term, because b_c w_c must be too."""
    cells = tokens.partition
    if isinstance(cells, CellSums):
        cells = cells.spread(tokens.logp, tokens.usable)
    assert cells is not None  # among the region's needs
    logp = tokens.logp.to(tokens.log_policy.dtype)
    own = torch.ones_like(tokens.log_ratio)
    extra: dict[str, Tensor] = {}
    if region.weight is not None:
        own = bounded_weight(tokens.log_ratio, region.weight)
        if isinstance(region.weight, TIS):
            extra["capped"] = tokens.log_ratio > math.log(region.weight.max_ratio)
    centered = own * logp - _expected(cells, tokens, logp, own, region)
    one = torch.ones_like(own)
    decision = Decision(torch.ones_like(tokens.usable), one, centered.to(tokens.logp.dtype), extra=extra)
    return corrected(tokens, region.correction, decision)


def _expected(
    cells: Partition, tokens: CleanTokens, logp: Tensor, own: Tensor, region: ScoreCentering
) -> Float[Tensor, " n"]:
    """Returns Σ_c sg(b_c w_c)·log π_c with gradient; only the gradient has a meaning. `own` is w(a)."""
    usable = tokens.usable
    held = usable.unsqueeze(-1) & (cells.log_policy > -torch.inf)
    mass = torch.where(held, _mass(cells.anchor, cells.log_anchor, cells.log_policy.detach(), region), 0.0)
    expected = (mass * torch.where(held, cells.log_policy, 0.0)).sum(-1)
    if cells.recorded is None:
        return expected
    own_b, recorded = tokens.log_anchor.exp(), cells.recorded
    expected = expected + torch.where(recorded, own_b * own * logp, 0.0)
    # All other ids, the sampled token included if it is one of them.
    rest_b = torch.where(usable, cells.anchor_tail + torch.where(recorded, 0.0, own_b), 0.0)
    rest_p = torch.where(usable, cells.policy_tail + torch.where(recorded, 0.0, logp.exp()), 1.0)
    # 1 − Σ below the rounding of its terms is noise. The floor keeps its factor b/π finite.
    floored = rest_p.detach().clamp(min=max(cells.resolution, torch.finfo(rest_p.dtype).tiny))
    factor = _mass(rest_b, rest_b.log(), floored.log(), region) / floored
    return expected + factor * rest_p


def _mass(b: Tensor, log_b: Tensor, log_p: Tensor, region: ScoreCentering) -> Tensor:
    """Returns b·f(π/b); 0 where the anchor has no mass."""
    if region.weight is None:
        return b
    return torch.where(b > 0, b * bounded_weight(log_p - log_b, region.weight), 0.0)
