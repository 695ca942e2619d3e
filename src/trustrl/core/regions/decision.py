"""The decision that every region returns, and the two factors that most of them share: weights and corrections."""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.statistics import BinaryTV
from trustrl.config.terms import MIS, TIS, Correction, DivergenceGate, IcePop
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences.interval import Interval
from trustrl.core.divergences.sampled import binary_kl, binary_tv
from trustrl.core.sequences import sequence_mean, sequence_total


@dataclass(frozen=True, slots=True)
class Decision:
    r"""A region's decision for each token. The loss is

        ℓ_t = −sg(M_t · w_t) · A_t · log π̃(a_t) + penalty_t,   gradient −M w A ∇log π̃

    where π̃ is the policy itself or its projection, and sg stops the gradient.
    """

    keep: Bool[Tensor, "*batch"]
    """M: False masks the token."""

    weight: Float[Tensor, "*batch"]
    """w, detached. Negative only where an objective bends back past its maximum."""

    logp: Float[Tensor, "*batch"]
    """log π̃ of the sampled token, with gradient."""

    value: Float[Tensor, "*batch"] | None = None
    """Value of the objective, detached, if the region maximizes one. The loss then has the value −value and the
    gradient above. None leaves the value at −M w A log π̃, which has no meaning by itself."""

    penalty: Float[Tensor, "*batch"] | None = None
    """Extra term with gradient, added to the loss of every usable token."""

    divergence: Interval | None = None
    """The measured distance of each token, with its certified interval."""

    max_increase: float | Float[Tensor, "*batch"] | None = None
    """Bounds the distance was compared with; None if the region has no edge. One per token if stale tokens have tighter
    ones."""

    max_decrease: float | Float[Tensor, "*batch"] | None = None

    narrows_with_k: bool = False
    """True if more recorded ids narrow the interval. Only then the share of undecided tokens is reported."""

    side: Float[Tensor, "*batch"] | None = None
    """Log-ratio whose sign selected the bound, if it is not the token's own (for example, a sequence mean)."""

    # torch.compile cannot trace a subscripted factory such as dict[str, Tensor].
    extra: dict[str, Tensor] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """Per-token values that only this region has, by metric name."""


def ratio_weight(log_ratio: Float[Tensor, "*batch"], *, max_ratio: float | None) -> Float[Tensor, "*batch"]:
    """Returns w = min(r, C). The cap applies before the exponential, so a capped weight never overflows."""
    return torch.exp(log_ratio if max_ratio is None else log_ratio.clamp(max=math.log(max_ratio)))


def weighted(
    tokens: CleanTokens, masked: Bool[Tensor, " n"], log_ratio: Float[Tensor, " n"], max_ratio: float | None
) -> Decision:
    """Returns a decision that masks some tokens and weights the others by their capped ratio."""
    extra = {} if max_ratio is None else {"capped": log_ratio > math.log(max_ratio)}
    return Decision(~masked, ratio_weight(log_ratio, max_ratio=max_ratio), tokens.logp, extra=extra)


def correction_factor(tokens: CleanTokens, correction: Correction) -> Float[Tensor, " n"]:
    """Returns the factor that corrects the mismatch k = π'/μ between trainer and sampler.

    TIS:              min(k, C)
    IcePop and MIS:   k where low ≤ k ≤ high, else 0
    DivergenceGate:   k where D(μ‖π') ≤ δ, else 0

    TIS and MIS may use the product of k over the sequence, MIS also its geometric mean, and the gate the mean of D.
    """
    assert tokens.log_mismatch is not None  # the region's needs include both anchors
    log_k = tokens.log_mismatch
    if isinstance(correction, DivergenceGate):
        return torch.where(_gated(tokens, log_k, correction), 0.0, torch.exp(log_k))
    level = getattr(correction, "level", "token")
    if level == "sequence-mean":
        log_k = sequence_mean(log_k, tokens.counted, tokens.grouped)
    elif level == "sequence-product":
        log_k = sequence_total(log_k, tokens.counted, tokens.grouped)
    return bounded_weight(log_k, correction)


def bounded_weight(log_k: Float[Tensor, "*batch"], term: TIS | IcePop | MIS) -> Float[Tensor, "*batch"]:
    """Returns f(k) of a correction: min(k, C) for TIS, k inside the band and 0 outside for IcePop and MIS."""
    if isinstance(term, TIS):
        return ratio_weight(log_k, max_ratio=term.max_ratio)
    k = torch.exp(log_k)
    return torch.where((k >= term.min_ratio) & (k <= term.max_ratio), k, 0.0)


def _gated(tokens: CleanTokens, log_k: Float[Tensor, " n"], gate: DivergenceGate) -> Bool[Tensor, " n"]:
    """Flags tokens whose π', or whose sequence's π' on average, is further from μ than the bound."""
    log_proximal = tokens.log_anchor  # a correction requires the anchor π'
    log_behavior = (log_proximal - log_k).clamp(max=0.0)
    if isinstance(gate.divergence, BinaryTV):
        found = binary_tv(log_proximal, log_behavior).lower
    else:
        found = binary_kl(log_proximal, log_behavior, resolution=tokens.resolution).lower
    if gate.level == "sequence":
        found = sequence_mean(found, tokens.counted, tokens.grouped)
    return found > gate.divergence.bounds[0]


def corrected(tokens: CleanTokens, correction: Correction | None, decision: Decision) -> Decision:
    """Multiplies a decision's weight and value by the correction factor."""
    if correction is None:
        return decision
    factor = correction_factor(tokens, correction)
    value = None if decision.value is None else decision.value * factor
    extra = {**decision.extra, "correction": factor, "correction_zero": factor == 0}
    return replace(decision, weight=decision.weight * factor, value=value, extra=extra)
