r"""Exact divergences between two heads' distributions, without either's [N, V] probabilities.

    TV = ½ Σ_j |m_j − p_j|,   KL = Σ_j m_j (log m_j − log p_j)          m the anchor's, p the policy's

Both normalisers must be known before the first term is, so this is a second pass over the vocabulary: one product for
each side. The KL is a sum of terms that are never negative, m (eˣ − 1 − x) with x = log p − log m, so that it does not
cancel for two policies that almost agree. Given ids use repaired logits on both sides.
"""

import torch
from torch import Tensor

from trustrl.kernels import tiles
from trustrl.kernels.streams import Cells
from trustrl.kernels.work import Pass, given_logits, slices


@torch.no_grad()
def divergence_sums(policy: Pass, anchor: Pass, policy_lse: Tensor, anchor_lse: Tensor) -> Tensor:
    """[N, 2]: (Σ |m − p|, Σ m log(m/p)) over this head's vocabulary."""
    with torch.autocast(policy.hidden.device.type, enabled=False):
        blocks = [
            _block(policy.rows(rows), anchor.rows(rows), policy_lse[rows], anchor_lse[rows])
            for rows in slices(policy.hidden.shape[0], policy.block_rows)
        ]
        return torch.cat(blocks)


def _block(policy: Pass, anchor: Pass, policy_lse: Tensor, anchor_lse: Tensor) -> Tensor:
    sides = [(work, work.hidden.to(work.product_dtype)) for work in (policy, anchor)]
    cells = Cells(policy)
    bases = policy_lse.unsqueeze(-1), anchor_lse.unsqueeze(-1)
    known = [given_logits(work) - base for work, base in zip((policy, anchor), bases, strict=True)]
    absolute, relative = tiles.divergence_terms(*known)
    counted = policy.counts
    sums = torch.stack([torch.where(counted, x, 0.0).sum(-1) for x in (absolute, relative)], dim=-1)
    size = policy.head.shape[0]
    room = sides[0][1].new_empty((2, len(counted) * min(policy.block_vocab, size)))
    for at, columns in enumerate(slices(size, policy.block_vocab)):
        products, biases = [], []
        for (work, hidden), space in zip(sides, room, strict=True):
            head = work.head[columns].to(work.product_dtype)
            product = space[: len(hidden) * len(head)].view(len(hidden), len(head))
            torch.mm(hidden, head.T, out=product)
            cells.mark(at, product)
            products.append(product)
            biases.append(None if work.bias is None else work.bias[columns])
        scale = policy.scale.unsqueeze(-1)
        absolute, relative = tiles.fused_divergence_sums(
            *products, *biases, scale, policy.softcap, *bases, large=policy.large
        )
        sums[:, 0] += absolute
        sums[:, 1] += relative
    return sums
