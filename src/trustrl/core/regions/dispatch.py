"""The registry of regions, and the general region on the shared axes.

A region is a settings class and a function `decide(tokens, settings) -> Decision`. Each published region's function is
in the module of its family.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.config import regions as settings
from trustrl.config.axes import PrefixBudget, Region, StalenessRegion, TrustRegion, reads_ages
from trustrl.config.loading import KINDS
from trustrl.config.statistics import Ratio
from trustrl.core.clean import CleanTokens
from trustrl.core.regions.batch import decide_m2po
from trustrl.core.regions.decision import Decision, corrected
from trustrl.core.regions.dppo import decide_dppo, decide_ipo, decide_symmetric, mask_tokens
from trustrl.core.regions.ppo import (
    clip_tokens,
    decide_cispo,
    decide_minirl,
    decide_policy_gradient,
    decide_ppo,
    truncate,
)
from trustrl.core.regions.score_centering import decide_score_centering
from trustrl.core.regions.sequence import (
    decide_cppo,
    decide_gmpo,
    decide_gspo,
    decide_opsm,
    decide_trm,
    decide_vespo,
    mask_prefixes,
    mask_sequences,
)
from trustrl.core.regions.soft import decide_drpo, decide_sapo, decide_spo, penalize_by
from trustrl.core.regions.troll import decide_troll
from trustrl.errors import ConfigError, MissingDataError
from trustrl.registry import Registry

Decide = Callable[[CleanTokens, Any], Decision]


class RegionKind(NamedTuple):
    """A registered region: its settings class and its decision function."""

    settings: type[Region]
    decide: Decide


REGION_KINDS: Registry[RegionKind] = Registry("region")


def register_region(settings_class: type[Region]) -> Callable[[Decide], Decide]:
    """Registers a region under its settings class's `kind`, for `policy_loss` and for loading from dictionaries.

    Raises:
        ConfigError: If the class is not a `Region`.
        DuplicateNameError: If the kind is already registered.
    """
    # Callers may run without a type checker.
    if not (isinstance(settings_class, type) and issubclass(settings_class, Region)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"A region's settings must be a subclass of trustrl.Region, got {settings_class!r}.")

    def add(decide: Decide) -> Decide:
        if KINDS.get(settings_class.kind) is not settings_class:
            KINDS.register(settings_class.kind)(settings_class)  # raises if other settings own the kind
        REGION_KINDS.register(settings_class.kind)(RegionKind(settings_class, decide))
        return decide

    return add


def decide(tokens: CleanTokens, region: Region) -> Decision:
    """Returns the region's decision for each token. Tokens with A = 0 are always kept.

    Raises:
        MissingDataError: If the region has a `max_staleness` and the records lack versions.
    """
    decision = _by_age(tokens, region) if reads_ages(region) else _by_region(tokens, region)
    return replace(decision, keep=decision.keep | (tokens.advantage == 0))


def _by_region(tokens: CleanTokens, region: Region) -> Decision:
    return REGION_KINDS[region.kind].decide(tokens, region)


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
        decision = _by_region(replace(tokens, tightening=1 + excess), region)
        if not isinstance(decision.max_increase, Tensor):
            raise ConfigError(
                f"{region.kind}.when_stale must be 'drop', got 'tighten'. Its decision function has no bound to "
                "tighten: it does not call mask_tokens."
            )
        return replace(decision, extra={**decision.extra, "stale": stale})
    decision = _by_region(tokens, region)
    blank = {
        name: torch.where(stale, 0.0, x)
        for name, x in (("value", decision.value), ("penalty", decision.penalty))
        if x is not None
    }
    return replace(decision, keep=decision.keep & ~stale, extra={**decision.extra, "stale": stale}, **blank)


def decide_on_axes(tokens: CleanTokens, region: TrustRegion) -> Decision:
    """Returns the decision of the general region: any action, level and direction on any statistic."""
    statistic, max_ratio = region.statistic, region.max_ratio
    if statistic is None or region.action == "truncate":
        decision = truncate(tokens, max_ratio=max_ratio)
    elif region.action == "penalise":
        decision = penalize_by(tokens, statistic)
    elif region.action == "clip" and isinstance(statistic, Ratio):
        decision = clip_tokens(tokens, statistic, textbook_value=True)
    elif isinstance(region.level, PrefixBudget):
        decision = mask_prefixes(tokens, statistic, region.level, max_ratio=max_ratio)
    elif region.level == "token":
        decision = mask_tokens(tokens, statistic, direction=region.direction, max_ratio=max_ratio)
    else:
        decision = mask_sequences(tokens, statistic, region.level, direction=region.direction, max_ratio=max_ratio)
    return corrected(tokens, region.correction, decision)


for _settings, _decide in {
    TrustRegion: decide_on_axes,
    settings.DPPO: decide_dppo,
    settings.TROLL: decide_troll,
    settings.PPO: decide_ppo,
    settings.GSPO: decide_gspo,
    settings.CISPO: decide_cispo,
    settings.SAPO: decide_sapo,
    settings.SPO: decide_spo,
    settings.DRPO: decide_drpo,
    settings.CPPO: decide_cppo,
    settings.IPO: decide_ipo,
    settings.KPOP: decide_symmetric,
    settings.TRM: decide_trm,
    settings.MiniRL: decide_minirl,
    settings.PolicyGradient: decide_policy_gradient,
    settings.GMPO: decide_gmpo,
    settings.OPSM: decide_opsm,
    settings.VESPO: decide_vespo,
    settings.M2PO: decide_m2po,
    settings.ScoreCentering: decide_score_centering,
}.items():
    register_region(_settings)(_decide)
