r"""Divergences over the anchor's top K, the sampled token, and one bucket for everything else.

S = TopK(b, K) ∪ {a}, tails m = 1 − b(S) and p = 1 − π(S). Merging cells can only lose divergence, so these lie between
the binary and the full divergences. TV also has a certified upper end.

Cost per token: K + 2 exponentials on each side, in float64.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.core.divergences.interval import Interval
from trustrl.core.numerics import kl_term
from trustrl.core.partition import CellSums, Partition


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
