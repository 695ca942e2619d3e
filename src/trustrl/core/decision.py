"""The decision that every region returns, and the rules that hold for all regions: corrections, stale tokens, A = 0."""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config.axes import Region, StalenessRegion, reads_ages
from trustrl.config.statistics import BinaryTV
from trustrl.config.terms import MIS, TIS, Correction, DivergenceGate, IcePop
from trustrl.core.clean import CleanTokens
from trustrl.core.divergences import Interval, binary_kl, binary_tv
from trustrl.core.sequences import sequence_mean, sequence_total
from trustrl.errors import ConfigError, MissingDataError


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


def decide(tokens: CleanTokens, region: Region) -> Decision:
    """Returns the region's decision for each token, with the rules that hold for all regions.

    The mismatch correction multiplies the weight, stale tokens are dropped or have a tighter bound, and tokens with
    A = 0 are kept.

    Raises:
        MissingDataError: If the region has a `max_staleness` and the records lack versions.
    """
    decision = _by_age(tokens, region) if reads_ages(region) else _corrected(tokens, region)
    return replace(decision, keep=decision.keep | (tokens.advantage == 0))


def _corrected(tokens: CleanTokens, region: Region) -> Decision:
    """Returns the region's own decision with its weight and value multiplied by the correction factor."""
    decision: Decision = region.decide(tokens)
    settings = region if hasattr(region, "correction") else region.axes()
    correction = getattr(settings, "correction", None)
    if not isinstance(correction, Correction):
        return decision
    factor = correction_factor(tokens, correction)
    value = None if decision.value is None else decision.value * factor
    extra = {**decision.extra, "correction": factor, "correction_zero": factor == 0}
    return replace(decision, weight=decision.weight * factor, value=value, extra=extra)


def _by_age(tokens: CleanTokens, region: StalenessRegion) -> Decision:
    r"""Returns the region's decision with its rule for stale tokens, age > n.

    drop:     M_t = 0, and no penalty
    tighten:  δ_t = δ / (1 + age − n)
    """
    assert region.max_staleness is not None
    if tokens.staleness is None:
        raise MissingDataError(
            f"RolloutTokens.version and PolicyTokens.version must be given: {region.kind} has max_staleness="
            f"{region.max_staleness}, got None. Record the version of the weights behind each sampled token, or set "
            "max_staleness to None."
        )
    excess = (tokens.staleness - region.max_staleness).clamp(min=0.0)
    stale = excess > 0
    if region.when_stale == "tighten":
        decision = _corrected(replace(tokens, tightening=1 + excess), region)
        if not isinstance(decision.max_increase, Tensor):
            raise ConfigError(
                f"{region.kind}.when_stale must be 'drop', got 'tighten'. Its decision has no bound to tighten: it "
                "does not call `measured`."
            )
        return replace(decision, extra={**decision.extra, "stale": stale})
    decision = _corrected(tokens, region)
    blank = {
        name: torch.where(stale, 0.0, x)
        for name, x in (("value", decision.value), ("penalty", decision.penalty))
        if x is not None
    }
    return replace(decision, keep=decision.keep & ~stale, extra={**decision.extra, "stale": stale}, **blank)


def ratio_weight(log_ratio: Float[Tensor, "*batch"], *, max_ratio: float | None) -> Float[Tensor, "*batch"]:
    """Returns w = min(r, C). The cap applies before the exponential, so a capped weight never overflows."""
    return torch.exp(log_ratio if max_ratio is None else log_ratio.clamp(max=math.log(max_ratio)))


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
        distance = binary_tv(log_proximal, log_behavior).lower
    else:
        distance = binary_kl(log_proximal, log_behavior, resolution=tokens.resolution).lower
    if gate.level == "sequence":
        distance = sequence_mean(distance, tokens.counted, tokens.grouped)
    return distance > gate.divergence.bounds[0]
