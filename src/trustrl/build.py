"""From settings to a function: what each region does with clean tokens.

A region is registered as its settings class and one function `decide(tokens, settings) -> Decision`. Those that are
points on the shared axes go through `decide_on_axes`; the others add their own rule here.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.cells import Cells
from trustrl.config import regions as settings
from trustrl.config.axes import PrefixBudget, Region, TrustRegion
from trustrl.config.loading import KINDS
from trustrl.config.statistics import (
    BinaryKL,
    BinaryTV,
    Divergence,
    FullKL,
    FullTV,
    Ratio,
    SampledK2,
    SampledK3,
    SequenceRatio,
    Statistic,
    SymmetricBinaryKL,
    TopKKL,
    TopKTV,
)
from trustrl.divergences import (
    Interval,
    binary_kl,
    binary_tv,
    full_kl,
    full_tv,
    k2,
    k3,
    point,
    ratio_gap,
    symmetric_binary_kl,
    topk_kl,
    topk_tv,
)
from trustrl.errors import ConfigError, MissingDataError
from trustrl.numerics import either
from trustrl.regions.clip import clipped_objective, quadratic_penalty, runaway, soft_gate
from trustrl.regions.correction import corrected
from trustrl.regions.decision import Decision
from trustrl.regions.mask import leaving, outside, ratio_weight
from trustrl.regions.sequence import overspent, sequence_max, sequence_mean, sequence_quantile
from trustrl.regions.troll import decide_troll
from trustrl.registry import Registry
from trustrl.tokens import Sequences, Tokens

Decide = Callable[[Tokens, Any], Decision]


class RegionKind(NamedTuple):
    """A registered region: its settings class and how it decides."""

    settings: type[Region]
    decide: Decide


REGION_KINDS: Registry[RegionKind] = Registry("region")


def register_region(settings_class: type[Region]) -> Callable[[Decide], Decide]:
    """Adds a region under its settings class's `kind`, for `policy_loss` and for loading from dictionaries.

    Raises:
        ConfigError: the class is no `Region`.
        DuplicateNameError: the kind is taken.
    """
    if not (isinstance(settings_class, type) and issubclass(settings_class, Region)):
        raise ConfigError(f"A region's settings must be a subclass of trustrl.Region, got {settings_class!r}.")

    def add(decide: Decide) -> Decide:
        if KINDS.get(settings_class.kind) is not settings_class:
            KINDS.register(settings_class.kind)(settings_class)  # refuses a kind that other settings own
        REGION_KINDS.register(settings_class.kind)(RegionKind(settings_class, decide))
        return decide

    return add


def decide(tokens: Tokens, region: Region) -> Decision:
    """The region's verdict on every token; A = 0 is always kept."""
    decision = REGION_KINDS[region.kind].decide(tokens, region)
    return replace(decision, keep=decision.keep | (tokens.advantage == 0))


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(tokens: Tokens, statistic: Statistic) -> Interval:
    """The statistic per token, as an interval."""
    match statistic:
        case Ratio():
            return ratio_gap(tokens.log_ratio, torch.zeros_like(tokens.log_ratio))
        case SequenceRatio():
            return point(torch.expm1(sequence_mean(tokens.log_ratio, tokens.counted, _sequences(tokens))).abs())
        case SampledK2():
            return point(k2(tokens.log_ratio))
        case SampledK3():
            return point(k3(tokens.log_ratio))
        case BinaryTV():
            return binary_tv(tokens.log_policy, tokens.log_anchor)
        case BinaryKL():
            return binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case SymmetricBinaryKL():
            return symmetric_binary_kl(tokens.log_policy, tokens.log_anchor, resolution=tokens.resolution)
        case TopKTV() | TopKKL():
            of = topk_tv if isinstance(statistic, TopKTV) else topk_kl
            return _blanked(tokens, of(_detached_cells(tokens), tokens.log_policy, tokens.log_anchor))
        case FullTV() | FullKL():
            return _blanked(tokens, _measure_full(tokens, statistic))
        case _:
            raise ConfigError(
                f"No way to measure {statistic!r}. Use one of trustrl's statistics, or register a region."
            )


def _measure_full(tokens: Tokens, statistic: FullTV | FullKL) -> Interval:
    name = "tv" if isinstance(statistic, FullTV) else "kl"
    if tokens.full_divergence is not None:
        given = getattr(tokens.full_divergence, name)
        if given is None:
            raise MissingDataError(f"PolicyTokens.full_divergence.{name} must be given for {statistic.kind}, got None.")
        return point(given)
    cells = _detached_cells(tokens)
    return (full_tv if name == "tv" else full_kl)(cells.log_policy, cells.log_anchor)


def _detached_cells(tokens: Tokens) -> Cells:
    assert tokens.cells is not None  # among the region's needs
    return tokens.cells._replace(
        log_policy=tokens.cells.log_policy.detach(),
        policy=tokens.cells.policy.detach(),
        policy_tail=tokens.cells.policy_tail.detach(),
    )


def _blanked(tokens: Tokens, interval: Interval) -> Interval:
    """0 on tokens that are not usable: their cells may hold anything."""
    return _each_end(interval, lambda end: torch.where(tokens.usable, end, 0.0))


def _each_end(interval: Interval, change: Callable[[Tensor], Tensor]) -> Interval:
    """Both ends changed alike; a point stays a point."""
    lower = change(interval.lower)
    return Interval(lower, lower if interval.upper is interval.lower else change(interval.upper))


def _sequences(tokens: Tokens) -> Sequences:
    assert tokens.sequences is not None  # among the region's needs
    return tokens.sequences


def _acting_end(interval: Interval, statistic: Statistic) -> Tensor:
    return interval.upper if isinstance(statistic, Divergence) and statistic.act_on == "upper" else interval.lower


# ── the shared axes ─────────────────────────────────────────────────────────────────────────────────────────────────


def decide_on_axes(tokens: Tokens, region: TrustRegion) -> Decision:
    """mask, clip, truncate or penalise, at token, sequence or prefix level."""
    if region.action == "truncate":
        decision = _weighted(tokens, torch.zeros_like(tokens.usable), tokens.log_ratio, region.max_ratio)
    elif region.action == "penalise":
        decision = _penalised(tokens, region)
    else:
        decision = _masked(tokens, region)
    return corrected(tokens, region.correction, decision)


def _weighted(
    tokens: Tokens,
    stop: Tensor,
    log_ratio: Tensor,
    max_ratio: float | None,
    divergence: Interval | None = None,
    bounds: tuple[float, float] | None = None,
) -> Decision:
    """The common shape: some tokens stopped, the others weighted by their ratio, capped."""
    low, high = bounds or (None, None)
    extra = {} if max_ratio is None else {"capped": log_ratio > math.log(max_ratio)}
    weight = ratio_weight(log_ratio, max_ratio=max_ratio)
    return Decision(~stop, weight, tokens.logp, divergence=divergence, max_increase=high, max_decrease=low, extra=extra)


def _masked(tokens: Tokens, region: TrustRegion) -> Decision:
    statistic = region.statistic
    assert statistic is not None  # refused when the settings were made
    interval = measure(tokens, statistic)
    low, high = statistic.bounds
    if isinstance(region.level, PrefixBudget):
        stop = _over_budget(tokens, _acting_end(interval, statistic), region.level, high)
        return _weighted(tokens, stop, tokens.log_ratio, region.max_ratio, interval, statistic.bounds)

    side, weight_ratio = tokens.log_ratio, tokens.log_ratio
    if region.level != "token":
        sequences = _sequences(tokens)
        side = sequence_mean(tokens.log_ratio, tokens.counted, sequences)
        if isinstance(statistic, SequenceRatio):
            weight_ratio = side
        else:
            over = sequence_mean if region.level == "sequence" else sequence_max
            interval = _each_end(interval, lambda end: over(end, tokens.counted, sequences))
    distance = _acting_end(interval, statistic)
    if region.direction == "symmetric":
        stop = outside(distance, side, max_increase=high, max_decrease=low)
    else:
        stop = leaving(distance, side, tokens.advantage, max_increase=high, max_decrease=low)
    decision = _weighted(tokens, stop, weight_ratio, region.max_ratio, interval, statistic.bounds)
    if side is not tokens.log_ratio:
        decision = replace(decision, side=side)
    if region.action == "clip":
        value = clipped_objective(tokens.log_ratio, tokens.advantage, max_increase=high, max_decrease=low)
        return replace(decision, value=value)
    return decision


def _over_budget(tokens: Tokens, distance: Tensor, level: PrefixBudget, bound: float) -> Tensor:
    sequences = _sequences(tokens)
    if level.rate == "p90":
        rate = sequence_quantile(distance, tokens.counted, sequences, share=0.9).clamp(level.rate_low, level.rate_high)
    else:
        rate = level.rate
    return overspent(
        distance,
        tokens.log_ratio,
        tokens.advantage,
        tokens.counted,
        sequences,
        bound=bound,
        rate=rate,
        last_weight=level.last_weight,
    )


def _penalised(tokens: Tokens, region: TrustRegion) -> Decision:
    statistic = region.statistic
    assert statistic is not None  # refused when the settings were made
    low, high = statistic.bounds
    width = either(tokens.log_ratio > 0, high, low, like=tokens.log_ratio)
    gap = torch.expm1(tokens.log_ratio) if isinstance(statistic, Ratio) else probability_gap(tokens)
    return _bent(tokens, gap, width)


def probability_gap(tokens: Tokens) -> Tensor:
    """π − b of the sampled token."""
    return torch.exp(tokens.log_policy) - torch.exp(tokens.log_anchor)


def _bent(tokens: Tokens, gap: Tensor, width: Tensor | float) -> Decision:
    weight, value = quadratic_penalty(tokens.log_ratio, gap, tokens.advantage, width=width)
    return Decision(torch.ones_like(tokens.usable), weight, tokens.logp, value=value)


# ── rules beside the axes ───────────────────────────────────────────────────────────────────────────────────────────


def decide_by_axes(tokens: Tokens, region: Any) -> Decision:
    """For regions that are exactly a point on the axes."""
    return decide_on_axes(tokens, region.axes())


def decide_ppo(tokens: Tokens, region: settings.PPO) -> Decision:
    """PPO's mask, with dual clip if asked."""
    decision = decide_on_axes(tokens, replace(region.axes(), correction=None))
    if region.dual_clip is not None:
        stop = runaway(tokens.log_ratio, tokens.advantage, max_ratio=region.dual_clip)
        value = decision.value
        if value is not None:
            value = torch.where(stop, region.dual_clip * tokens.advantage, value)
        decision = replace(decision, keep=decision.keep & ~stop, value=value)
    return corrected(tokens, region.correction, decision)


def decide_sapo(tokens: Tokens, region: settings.SAPO) -> Decision:
    """SAPO's soft gate."""
    weight, value = soft_gate(
        tokens.log_ratio,
        tokens.advantage,
        temperature_positive=region.temperature_positive,
        temperature_negative=region.temperature_negative,
    )
    decision = Decision(torch.ones_like(tokens.usable), weight, tokens.logp, value=value)
    return corrected(tokens, region.correction, decision)


def decide_drpo(tokens: Tokens, region: settings.DRPO) -> Decision:
    """DRPO's penalty; not on the axes because its published width is no probability gap."""
    return corrected(tokens, region.correction, _bent(tokens, probability_gap(tokens), region.width))


def decide_ipo(tokens: Tokens, region: settings.IPO) -> Decision:
    """IPO's symmetric mask, with its log-ratio term if asked."""
    decision = decide_on_axes(tokens, region.axes())
    if region.log_ratio_penalty == 0:
        return decision
    log_ratio = tokens.logp - tokens.log_anchor.to(tokens.logp.dtype)
    return replace(decision, penalty=region.log_ratio_penalty * log_ratio.square())


def decide_trm(tokens: Tokens, region: settings.TRM) -> Decision:
    """Drops whole sequences by the maximum of D and, if asked, by its mean."""
    shared = {"anchor": region.anchor, "direction": "symmetric", "max_ratio": region.max_ratio}
    decision = decide_on_axes(
        tokens, TrustRegion(region.statistic, level="sequence-max", correction=region.correction, **shared)
    )
    if region.mean is None:
        return decision
    by_mean = decide_on_axes(tokens, TrustRegion(region.mean, level="sequence", **shared))
    return replace(decision, keep=decision.keep & by_mean.keep)


def decide_minirl(tokens: Tokens, region: settings.MiniRL) -> Decision:
    """PPO's mask on π/π', weights π/μ."""
    assert tokens.log_mismatch is not None  # both anchors are among the region's needs
    low, high = region.ratio.bounds
    interval = measure(tokens, region.ratio)
    stop = leaving(interval.lower, tokens.log_ratio, tokens.advantage, max_increase=high, max_decrease=low)
    log_weight = tokens.log_ratio + tokens.log_mismatch
    return _weighted(tokens, stop, log_weight, region.max_ratio, interval, region.ratio.bounds)


for _settings, _decide in {
    TrustRegion: decide_on_axes,
    settings.DPPO: decide_by_axes,
    settings.TROLL: decide_troll,
    settings.PPO: decide_ppo,
    settings.GSPO: decide_by_axes,
    settings.CISPO: decide_by_axes,
    settings.SAPO: decide_sapo,
    settings.SPO: decide_by_axes,
    settings.DRPO: decide_drpo,
    settings.CPPO: decide_by_axes,
    settings.IPO: decide_ipo,
    settings.KPOP: decide_by_axes,
    settings.TRM: decide_trm,
    settings.MiniRL: decide_minirl,
    settings.PolicyGradient: decide_by_axes,
}.items():
    register_region(_settings)(_decide)
