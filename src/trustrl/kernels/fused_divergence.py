r"""Exact divergences between the distributions of two heads, without the [N, V] probabilities of either.

    TV = ½ Σ_j |m_j − p_j|,   KL = Σ_j m_j (log m_j − log p_j)          m: anchor, p: policy

The first term needs both normalizers, so this is a second pass over the vocabulary, with one product for each side. The
KL is a sum of terms that are never negative, m (eˣ − 1 − x) with x = log p − log m, so it does not cancel for two
policies that almost agree. Given ids use repaired logits on both sides (see `chunked_pass`).
"""

import torch
from torch import Tensor

from trustrl.kernels import devices, tile_math
from trustrl.kernels.pass_inputs import PassInputs, given_cells, given_logits, slices


@torch.no_grad()
def divergence_sums(
    policy: PassInputs, anchor: PassInputs, policy_lse: Tensor, anchor_lse: Tensor, live: Tensor
) -> Tensor:
    """Returns [N, 2]: (Σ |m − p|, Σ m log(m/p)) over this head's part of the vocabulary, and 0 on rows not `live`.

    Those rows cost nothing on a CPU. An accelerator computes them like the others, because their number is a value.
    """
    with torch.autocast(policy.hidden.device.type, enabled=False):
        if not devices.free_to_look(live):
            sums = _sums(policy, anchor, policy_lse, anchor_lse)
            return torch.where(live.unsqueeze(-1), sums, 0.0)
        rows = live.nonzero().squeeze(-1)
        sums = _sums(policy.rows(rows), anchor.rows(rows), policy_lse[rows], anchor_lse[rows])
        return sums.new_zeros((len(live), 2)).index_copy_(0, rows, sums)


def _sums(policy: PassInputs, anchor: PassInputs, policy_lse: Tensor, anchor_lse: Tensor) -> Tensor:
    blocks = slices(policy.hidden.shape[0], policy.block_rows)
    return torch.cat(
        [_block_sums(policy.rows(rows), anchor.rows(rows), policy_lse[rows], anchor_lse[rows]) for rows in blocks]
    )


def _block_sums(policy: PassInputs, anchor: PassInputs, policy_lse: Tensor, anchor_lse: Tensor) -> Tensor:
    sides = [(side, side.hidden.to(side.product_dtype)) for side in (policy, anchor)]
    cells = given_cells(policy)
    bases = policy_lse.unsqueeze(-1), anchor_lse.unsqueeze(-1)
    known = [given_logits(side) - base for side, base in zip((policy, anchor), bases, strict=True)]
    absolute, relative = tile_math.divergence_terms(*known)
    counted = policy.counts
    sums = torch.stack([torch.where(counted, x, 0.0).sum(-1) for x in (absolute, relative)], dim=-1)
    size = policy.head.shape[0]
    room = sides[0][1].new_empty((2, len(counted) * min(policy.block_vocab, size)))
    for tile_index, columns in enumerate(slices(size, policy.block_vocab)):
        products: list[Tensor] = []
        biases: list[Tensor | None] = []
        for (side, hidden), space in zip(sides, room, strict=True):
            head = side.head[columns].to(side.product_dtype)
            product = space[: len(hidden) * len(head)].view(len(hidden), len(head))
            torch.mm(hidden, head.T, out=product)
            cells.mark(tile_index, product)
            products.append(product)
            biases.append(None if side.bias is None else side.bias[columns])
        scale = policy.scale.unsqueeze(-1)
        absolute, relative = tile_math.fused_divergence_sums(
            *products, *biases, scale, policy.softcap, *bases, large=policy.large
        )
        sums[:, 0] += absolute
        sums[:, 1] += relative
    return sums
