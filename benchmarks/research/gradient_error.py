"""Record of the columns that a compacted backward pass drops, and a bound on the gradient error this causes.

Shape suffixes: N tokens, D hidden size, V vocabulary, B blocks of rows.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Dropped(NamedTuple):
    """The part of the vocabulary that the backward pass drops."""

    columns_kept_B: Float[Tensor, " B"]
    """Share of the vocabulary that each block of rows multiplies."""

    mass_N: Float[Tensor, " N"]
    """Dropped probability mass of the row's whole distribution."""

    rest_N: Float[Tensor, " N"]
    """log-sum-exp outside the given ids. Differentiable, so that the loss's coefficient on it can be computed."""

    inner_N: Float[Tensor, " N"]
    """Entropy within the rest; differentiable."""

    share_N: Float[Tensor, " N"]
    """Dropped share of the rest, m = Σ q."""

    spread_N: Float[Tensor, " N"]
    """The dropped columns' part of the rest's entropy, −Σ q log q."""

    shape_BV: Float[Tensor, "B V"]
    """s_b, the distribution that spreads a block's dropped gradient over the columns; 0 at kept columns."""

    drop_below: float
    block_rows: int
    scale: float


class GradientError(NamedTuple):
    """Bounds on the gradient error caused by dropping. They exclude the products' own rounding."""

    hidden_N: Float[Tensor, " N"]
    """Upper bound of ‖Δ d_hidden_n‖."""

    head: Float[Tensor, ""]
    """Upper bound of ‖Δ d_head‖_F."""


def gradient_error_bound(
    loss: Float[Tensor, ""], dropped: Dropped, hidden_ND: Float[Tensor, "N D"], head_VD: Float[Tensor, "V D"]
) -> GradientError:
    r"""Returns bounds on the error of the gradients of `loss`. Call it before `loss.backward()`.

    On a dropped column, with q = exp(z − rest) and a row's coefficients a, b:   dz_j = q_j (a − b log q_j)

        Σ_j |dz_j| ≤ A = |a| m + |b| Σ q |log q|,      max_j |dz_j| ≤ P = |a| ε + |b| ε |log ε|,   ε ≥ q_j

    A row's dropped part Σ dz_j W_j is replaced by (Σ dz_j) W̄ with W̄ = Σ s_j W_j, and dz itself by (Σ dz_j) s:

        ‖Δ d_hidden_n‖ = ‖Σ dz_j (W_j − W̄)‖ ≤ A_n · max_j ‖W_j − W̄‖
        ‖Δ d_head‖²_F  = Σ_nm (h_n·h_m)(e_n·e_m) ≤ uᵀ |H Hᵀ| u,   ‖e_n‖ ≤ u_n = √(P_n A_n) + A_n ‖s‖

    where e_n is the error of dz in row n and a sum of squares is at most its largest term times its sum.
    """
    rest, inner = dropped.rest_N.detach(), dropped.inner_N.detach()
    grads = torch.autograd.grad(loss, (dropped.rest_N, dropped.inner_N), retain_graph=True, allow_unused=True)
    d_rest, d_inner = (torch.zeros_like(rest) if g is None else g for g in grads)
    on_mass, on_log = (d_rest - d_inner * inner).abs(), d_inner.abs()
    # p ≤ drop_below in the whole distribution means q ≤ drop_below / (mass of the rest); q |log q| peaks at 1/e.
    tail = torch.where(dropped.share_N > 0, dropped.mass_N / dropped.share_N, 1.0)
    q = (dropped.drop_below / tail).clamp(max=1.0)
    q_log_q = torch.where(q < 1 / math.e, -torch.special.xlogy(q, q), 1 / math.e)
    most_N = dropped.scale * (on_mass * dropped.share_N + on_log * dropped.spread_N)
    peak_N = dropped.scale * (on_mass * q + on_log * q_log_q)
    block_N = torch.arange(len(rest), device=rest.device) // dropped.block_rows
    hidden, head = hidden_ND.detach().to(rest.dtype), head_VD.detach().to(rest.dtype)
    apart_BV = torch.cdist(dropped.shape_BV @ head, head).masked_fill(dropped.shape_BV == 0, 0.0)
    error_N = torch.sqrt(peak_N * most_N) + most_N * dropped.shape_BV.norm(dim=-1)[block_N]
    return GradientError(
        hidden_N=most_N * apart_BV.amax(-1)[block_N],
        head=torch.sqrt(error_N @ (hidden @ hidden.T).abs() @ error_N),
    )
