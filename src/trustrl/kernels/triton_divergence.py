r"""Exact divergences between the distributions of two heads, in Triton: the sums that `fused_divergence` defines.

    Σ_j |m_j − p_j|,   Σ_j m_j (eˣ − 1 − x) with x = log p_j − log m_j          m: anchor, p: policy

One kernel computes both products of each tile, so neither is ever stored. Given ids use separate float32 dot products
on both sides. The second term is summed by its series where |x| < 0.5 and as p − m − m x elsewhere: it does not cancel
for two policies that almost agree, and nothing overflows.

Memory in addition to inputs and results: 12 · S · N bytes, S · N ≤ `PROGRAMS` · 128 + N, and four arrays [N, C].

Shape suffixes: N tokens, D hidden size, V vocabulary, C given ids per token, S splits.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.kernels.pass_inputs import PassInputs
from trustrl.kernels.tile_math import divergence_terms
from trustrl.kernels.triton_kernels import divergence_kernel
from trustrl.kernels.triton_launch import (
    DIVERGENCE_LAUNCHES,
    aligned,
    blocks,
    compile_time,
    dense,
    due_ids,
    launch_for,
    ordered_rows,
)
from trustrl.kernels.triton_pass import given_logits


@torch.no_grad()
def divergence_sums(
    policy: PassInputs,
    anchor: PassInputs,
    policy_lse_N: Float[Tensor, " N"],
    anchor_lse_N: Float[Tensor, " N"],
    live_N: Bool[Tensor, " N"],
) -> Float[Tensor, "N 2"]:
    """Returns (Σ |m − p|, Σ m log(m/p)) over this head's part of the vocabulary; 0 in rows that are not live."""
    sides: list[tuple[Tensor, Tensor, Tensor | None]] = [
        dense(*aligned(side.hidden.to(side.product_dtype), side.head.to(side.product_dtype)), side.bias)
        for side in (policy, anchor)
    ]
    bases: tuple[Tensor, Tensor] = dense(policy_lse_N.float(), anchor_lse_N.float())
    scale_N, ids_NC = dense(policy.scale.float(), policy.ids)
    hidden_ND, head_VD, _ = sides[0]
    N, V = len(hidden_ND), len(head_VD)
    depths = [hidden.shape[1] for hidden, _, _ in sides]
    launch = launch_for(hidden_ND, head_VD, DIVERGENCE_LAUNCHES)
    rows = ordered_rows(live_N)
    due = due_ids(ids_NC, policy.counts, V, launch)
    splits = len(due.starts_SN)
    partials_2SN = torch.zeros(2, splits, N, dtype=torch.float32, device=hidden_ND.device)
    with torch.cuda.device_of(hidden_ND):
        divergence_kernel[(blocks(N, launch.rows) * splits,)](
            *sides[0], *sides[1], scale_N, policy.softcap, *bases, *rows, *due[:2], partials_2SN,
            N, V, *depths, splits, due.tiles, **compile_time(launch, *depths),
        )  # fmt: skip
    known = [
        given_logits(*side, ids_NC, scale_N, policy.softcap, rows) - base.unsqueeze(-1)
        for side, base in zip(sides, bases, strict=True)
    ]
    counted_NC = policy.counts & live_N.unsqueeze(-1)
    sums = [
        partials_SN.sum(0) + torch.where(counted_NC, terms_NC, 0.0).sum(-1)
        for partials_SN, terms_NC in zip(partials_2SN, divergence_terms(*known), strict=True)
    ]
    return torch.stack(sums, dim=-1)
