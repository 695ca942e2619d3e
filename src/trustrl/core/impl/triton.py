"""The steps of `policy_loss` on a GPU, by the launches of `kernels.token_pass`.

Each function returns the result of the function of that name in `eager`. The region's decision stays in torch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trustrl.config.axes import Needs
from trustrl.config.terms import Reduction
from trustrl.core.clean import CleanTokens, OnNonFinite, clean_divergence, clean_tokens, largest_term, require_fields
from trustrl.core.decision import Decision, decide
from trustrl.core.diagnostics import Sums, constants, other_sums, sum_inputs
from trustrl.core.losses import finish, weights_of
from trustrl.core.partition import (
    ANCHOR_NOISE,
    COARSE_ROUNDOFF,
    FINE_ROUNDOFF,
    LARGEST_LOGP,
    CellSums,
    column_faults,
    flat_columns,
    largest_mass,
    resolution_of,
)
from trustrl.core.records import PolicyTokens, RolloutTokens, check_pair
from trustrl.core.sequences import rows_as_sequences, sequences_of
from trustrl.core.sum_table import FIRST_BIN, HALF, MANTISSA_BITS, NUM_BINS, PROBABILITY_EDGES, STALENESS_EDGES
from trustrl.kernels import token_pass
from trustrl.kernels.id_columns import Columns
from trustrl.kernels.logprob_outputs import wide_dtype

__all__ = ["clean", "collect", "decide", "reduced_loss"]

SETTINGS: dict[str, Any] = {
    **constants(torch.float64),
    "HALF": HALF,
    "FIRST_BIN": FIRST_BIN,
    "BIN_SHIFT": 23 - MANTISSA_BITS,
    "PROBABILITY_EDGES": PROBABILITY_EDGES,
    "STALENESS_EDGES": STALENESS_EDGES,
}
"""Compile-time numbers of the kernel of the sums."""


def clean(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite) -> CleanTokens:
    """Returns the result of `eager.clean`. Whole distributions are left to it."""
    if needs.full and (needs.projects or policy.full_divergence is None):
        return clean_tokens(policy, rollout, needs, on_nonfinite=on_nonfinite)
    check_pair(policy, rollout)
    require_fields(policy, rollout, needs)
    columns = resolution = divergence = sound = versions = None
    if policy.full_divergence is not None and needs.full:
        divergence, sound = clean_divergence(policy.full_divergence)
    elif needs.topk:
        columns, resolution = flat_columns(policy, rollout, needs)
    if rollout.version is not None and policy.version is not None:
        versions = rollout.version.reshape(-1), policy.version
    num_cells = 2 + (0 if columns is None else columns.ids.shape[-1])
    rows = token_pass.clean(
        policy.logp.detach().reshape(-1),
        None if rollout.behavior_logp is None else rollout.behavior_logp.reshape(-1),
        None if rollout.proximal_logp is None else rollout.proximal_logp.reshape(-1),
        rollout.advantage.reshape(-1),
        rollout.in_loss.reshape(-1),
        versions,
        sound,
        columns,
        reads=needs.anchors,
        anchor=needs.anchor,
        wide=wide_dtype(policy.logp),
        limits={
            "LARGEST": LARGEST_LOGP,
            "NOISE": ANCHOR_NOISE,
            "MASS_COARSE": largest_mass(num_cells, COARSE_ROUNDOFF),
            "MASS_FINE": largest_mass(num_cells, FINE_ROUNDOFF),
        },
    )
    partition = None
    if columns is not None:
        assert resolution is not None
        anchor_tail, policy_tail, tv, kl = rows.cells
        partition = CellSums(anchor_tail, policy_tail, tv, kl, resolution, columns)
    counted = dict(zip(token_pass.SAMPLED_FAULTS + token_pass.COLUMN_FAULTS, rows.faults.unbind(), strict=True))
    both = rollout.behavior_logp is not None and rollout.proximal_logp is not None
    in_loss, num_rows = rollout.in_loss.reshape(-1), rows_as_sequences(rollout)
    return CleanTokens(
        logp=_blank(policy.logp.reshape(-1), rows.blanked, rows.usable),
        log_policy=rows.log_policy,
        log_anchor=rows.log_anchor,
        anchor=needs.anchor,
        log_ratio=rows.log_ratio,
        resolution=resolution_of(policy.logp, getattr(rollout, f"{needs.anchor}_logp")),
        largest_term=largest_term(policy.logp.dtype),
        advantage=rows.advantage,
        in_loss=in_loss,
        usable=rows.usable,
        counted=in_loss if on_nonfinite == "zero" else rows.usable,
        log_mismatch=rows.mismatch if both else None,
        sequences=sequences_of(rollout) if needs.sequences or num_rows is None else None,
        partition=partition,
        full_divergence=divergence,
        faults={name: counted[name] for name in _fault_names(needs, sound is not None, columns)},
        staleness=None if versions is None else rows.staleness,
        num_rows=num_rows,
    )


def _fault_names(needs: Needs, exact: bool, columns: Columns | None) -> list[str]:
    """Returns the kinds of faults that can occur."""
    names = ["policy", "advantage", *(name for name in ("behavior", "proximal") if name in needs.anchors)]
    if exact:
        names.append("support")
    if columns is not None:
        names += column_faults(columns)
    return names


class _Blank(Function):
    """Blanked log-probs, computed elsewhere, as a function of the log-probs."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, blanked: Tensor, usable: Tensor) -> Tensor:
        ctx.save_for_backward(usable)
        ctx.dtype = logp.dtype
        return blanked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (usable,) = ctx.saved_tensors
        return gradients[0].masked_fill(~usable, 0.0).to(ctx.dtype), None, None


def _blank(logp: Tensor, blanked: Tensor, usable: Tensor) -> Tensor:
    function: Any = _Blank
    return function.apply(logp, blanked, usable)


def reduced_loss(decision: Decision, tokens: CleanTokens, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Returns the result of `eager.reduced_loss`."""
    weights = weights_of(tokens, reduction)
    function: Any = _Loss
    total, overflow = function.apply(decision.logp, decision.penalty, decision, tokens, weights)
    return finish(total, tokens, reduction), overflow


class _Loss(Function):
    """Σ terms. The forward pass has computed its gradient."""

    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, penalty: Tensor | None, decision: Decision, tokens: CleanTokens, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total, slope, overflow = token_pass.terms(
            logp, decision.keep, decision.weight, tokens.advantage, tokens.usable, decision.value, penalty, weights,
            tokens.largest_term,
        )  # fmt: skip
        ctx.save_for_backward(slope, overflow, tokens.usable, weights)
        ctx.penalized = penalty is not None
        ctx.mark_non_differentiable(overflow)
        return total, overflow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        slope, overflow, usable, weights = ctx.saved_tensors
        upstream = gradients[0].to(slope.dtype)
        d_penalty = None
        if ctx.penalized:
            d_penalty = (usable & ~overflow).to(slope.dtype) * upstream
            d_penalty = d_penalty if weights is None else d_penalty * weights.to(d_penalty.dtype).nan_to_num()
        return slope * upstream, d_penalty, None, None, None


def collect(
    tokens: CleanTokens, decision: Decision, overflow: Tensor, policy: PolicyTokens, terms: dict[str, Tensor]
) -> Sums:
    """Returns the result of `eager.collect`."""
    columns = sum_inputs(tokens, decision, overflow, policy)._asdict()
    added, highest = token_pass.sums(columns, num_bins=NUM_BINS, settings=SETTINGS)
    if "by_staleness" in added:
        added["by_staleness"] = added["by_staleness"][: len(STALENESS_EDGES) + 1]
    return Sums(added | other_sums(tokens, decision, terms), highest)
