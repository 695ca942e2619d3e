r"""Divergences over the anchor's top K, the sampled token, and one bucket for everything else.

S = TopK(b, K) ∪ {a}, tails m = 1 − b(S) and p = 1 − π(S). Merging cells can only lose divergence, so these lie between
the binary and the full ones; TV has a certified upper end as well.

Cost per token: K + 2 exponentials each side, in float64.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.cells import Cells
from trustrl.divergences.interval import Interval
from trustrl.numerics import kl_term


def topk_tv(cells: Cells, log_policy: Float[Tensor, " n"], log_anchor: Float[Tensor, " n"]) -> Interval:
    r"""Total variation with its certified interval.

        ½(Σ_S |b−π| + |m−p|) ≤ TV ≤ ½(Σ_S |b−π| + m + p),   width = min(m, p)

    Args:
        cells: The known ids beside the sampled one, and the tails.
        log_policy: log π of the sampled token.
        log_anchor: log b of the sampled token.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 15 (the lower end).
    """
    on_token = (torch.exp(log_anchor) - torch.exp(log_policy)).abs()
    on_cells = on_token + (cells.anchor - cells.policy).abs_().sum(-1)
    m, p = cells.anchor_tail, cells.policy_tail
    lower, upper = 0.5 * (on_cells + (m - p).abs()), 0.5 * (on_cells + m + p)
    return Interval(lower.clamp(max=1.0), upper.clamp(max=1.0))


def topk_kl(cells: Cells, log_policy: Float[Tensor, " n"], log_anchor: Float[Tensor, " n"]) -> Interval:
    r"""KL(b‖π) over the cells: a lower bound, closed upwards only where the anchor has no tail.

        D = Σ_S b log(b/π) + m log(m/p);   m = 0 ⇒ the tail's term is 0,   m > 0 = p ⇒ +inf

    A tail that is 1 − Σ is known only to the rounding of what was summed. With p below that, p stands at it: where
    nearly nothing is left outside, rounding alone would make an infinite divergence.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 16.
    """
    m, p = cells.anchor_tail, cells.policy_tail
    p = torch.where(m > 0, p.clamp(min=cells.resolution), p)
    on_cells = kl_term(log_anchor, log_policy) + kl_term(cells.log_anchor, cells.log_policy).sum(-1)
    lower = (on_cells + kl_term(torch.log(m), torch.log(p))).clamp(min=0.0)
    return Interval(lower, torch.where(m > 0, torch.inf, lower))
