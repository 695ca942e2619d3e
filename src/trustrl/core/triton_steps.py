"""The steps of `policy_loss` on a GPU, by the launches of `kernels.token_pass`.

Each function returns the result of the definition that it names. The region's decision between them stays in torch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trustrl.config.axes import Needs
from trustrl.config.terms import Reduction
from trustrl.core.clean import CleanTokens, OnNonFinite, clean_divergence, clean_tokens, largest_term, require_fields
from trustrl.core.diagnostics import LARGEST_LOG_RATIO, Sums, add_extra, count_sequences
from trustrl.core.histograms import FIRST_BIN, HALF, MANTISSA_BITS, NUM_BINS, PROBABILITY_EDGES, STALENESS_EDGES
from trustrl.core.numerics import largest_exponent
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
from trustrl.core.reductions import finish, weights_of
from trustrl.core.regions.decision import Decision
from trustrl.core.sequences import rows_as_sequences, sequences_of
from trustrl.kernels import token_pass
from trustrl.kernels.logprob_outputs import wide_dtype
from trustrl.kernels.recorded_columns import Columns

HISTOGRAM_SETTINGS: dict[str, Any] = {
    "LARGEST_LOG_RATIO": LARGEST_LOG_RATIO,
    "LARGEST_EXPONENT": largest_exponent(torch.float64),
    "HALF": HALF,
    "FIRST_BIN": FIRST_BIN,
    "BIN_SHIFT": 23 - MANTISSA_BITS,
    "PROBABILITY_EDGES": PROBABILITY_EDGES,
    "STALENESS_EDGES": STALENESS_EDGES,
}


def clean(policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite) -> CleanTokens:
    """Returns the result of `clean_tokens`. Whole distributions are left to it."""
    if needs.full and (needs.projects or policy.full_divergence is None):
        return clean_tokens(policy, rollout, needs, on_nonfinite=on_nonfinite)
    check_pair(policy, rollout)
    require_fields(policy, rollout, needs)
    columns = resolution = divergence = sound = None
    if policy.full_divergence is not None and needs.full:
        divergence, sound = clean_divergence(policy.full_divergence)
    elif needs.topk:
        columns, resolution = flat_columns(policy, rollout, needs)
    versions = None
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
    """Blanked log-probs, computed elsewhere, as a function of the given ones."""

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
    """Returns `reduce_terms` of `policy_terms`, and the overflow flags."""
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
        given = token_pass.TermInputs(
            logp=logp,
            keep=decision.keep,
            weight=decision.weight,
            advantage=tokens.advantage,
            usable=tokens.usable,
            value=decision.value,
            penalty=penalty,
            weights=weights,
        )
        total, slope, overflow = token_pass.terms(given, tokens.largest_term)
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
    """Returns the result of `core.diagnostics.collect`."""
    lower, upper = (None, None) if decision.divergence is None else decision.divergence
    bounded = decision.max_increase is not None and decision.max_decrease is not None
    narrows = lower is not None and bounded and decision.narrows_with_k
    bounds = (decision.max_increase, decision.max_decrease) if narrows else (None, None)
    partition, entropy = tokens.partition, policy.entropy
    given = token_pass.SumInputs(
        in_loss=tokens.in_loss,
        usable=tokens.usable,
        overflow=overflow,
        keep=decision.keep,
        advantage=tokens.advantage,
        log_policy=tokens.log_policy,
        log_anchor=tokens.log_anchor,
        log_ratio=tokens.log_ratio,
        weight=decision.weight,
        side=decision.side,
        lower=lower,
        upper=None if upper is lower else upper,
        tail_anchor=None if partition is None else partition.anchor_tail,
        tail_policy=None if partition is None else partition.policy_tail.detach(),
        entropy=None if entropy is None else entropy.detach().reshape(-1),
        mismatch=tokens.log_mismatch,
        staleness=tokens.staleness,
        max_increase=_bound(bounds[0], tokens),
        max_decrease=_bound(bounds[1], tokens),
    )
    found, extremes, histograms = token_pass.sums(
        given, bounded=bounded, num_bins=NUM_BINS, settings=HISTOGRAM_SETTINGS
    )
    names = _names(given, bounded=bounded)
    added = {name: found[name] for name in names if name in found}
    added["by_probability"] = found["by_probability"]
    added |= {f"loss/{name}": term.to(torch.float64) for name, term in terms.items()}
    added |= {f"fault/{name}": count for name, count in tokens.faults.items()}
    added |= count_sequences(tokens)
    if partition is not None:
        added["tail/measured"] = added["measured"]
    if tokens.staleness is not None:
        added["staleness/measured"] = added["measured"]
        added["by_staleness"] = found["by_staleness"][: len(STALENESS_EDGES) + 1]
    for place, name in enumerate(("gap", "log_ratio", "divergence", "divergence_upper")):
        if name in names or (name == "divergence_upper" and given.upper is not None):
            added[f"histogram/{name}"] = histograms[place]
    add_extra(added, tokens, decision)
    return Sums(added, {name: extremes[name] for name in names if name in extremes})


def _bound(bound: float | Tensor | None, tokens: CleanTokens) -> Tensor | None:
    if bound is None or isinstance(bound, Tensor):
        return bound
    return tokens.log_ratio.new_full((1,), bound)


def _names(given: token_pass.SumInputs, *, bounded: bool) -> set[str]:
    """Returns the names of the sums and extremes whose inputs are there."""
    absent: set[str] = set()
    if given.lower is None:
        absent |= {"divergence", "divergence/finite", "divergence/infinite", "max/divergence", "bounded"}
    if given.upper is None:
        absent |= {"divergence/upper", "divergence/upper_finite"}
    if not bounded:
        absent.add("bounded")
    if given.max_increase is None:
        absent.add("undecided")
    for field, prefix in (
        ("tail_anchor", "tail/"),
        ("entropy", "entropy/"),
        ("mismatch", "mismatch"),
        ("staleness", "staleness"),
    ):
        if getattr(given, field) is None:
            absent |= {name for name in token_pass.TOTALS + token_pass.EXTREMES if name.startswith(prefix)}
            absent |= {f"max/{prefix}", f"min/{prefix}"}
    return set(token_pass.TOTALS + token_pass.EXTREMES) - absent
