"""The shared axes of all regions, and the data that a region needs.

anchor × statistic × direction × level × action: each is an independent choice. Combinations without a meaning raise.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeGuard, get_args

from trustrl.config import validators
from trustrl.config.statistics import (
    ANCHORS,
    Anchor,
    BinaryTV,
    Divergence,
    FullKL,
    FullTV,
    Ratio,
    SequenceRatio,
    Statistic,
    TopKKL,
    TopKTV,
)
from trustrl.config.terms import Correction, SequenceMeanTokenMean, reads_sequences
from trustrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Data that a region needs. Engines read it to know what to record; `policy_loss` reads it to raise early."""

    anchors: frozenset[Anchor] = frozenset({"behavior"})
    """Policies whose log-probs of the sampled token are needed: the anchor's, and both for a mismatch correction."""

    topk: int = 0
    """Number of the anchor's most probable ids to record with their log-probs; 0 for none."""

    anchor: Anchor = "behavior"
    """b: the policy that distances are measured from. The top-K and the full distribution must belong to it."""

    tail_mass: float = 0.0
    """A recorder may record fewer than `topk` ids if the anchor's remaining mass is below this."""

    own_topk: Literal["none", "known", "fill", "published"] = "none"
    """Use of the policy's own top ids: none, those where the anchor is known, all with the anchor filled in, or TROLL's
    published selection, which fills in both sides."""

    projects: bool = False
    """True if the region differentiates through the whole support, not only through the sampled token."""

    full: bool = False
    """True if the region needs the whole distribution, or an exact divergence computed from it."""

    sequences: bool = False
    """True if decisions depend on whole sequences, so that micro-batches may be split only between sequences."""

    whole_call: bool = False
    """True if decisions depend on all tokens of one `policy_loss` call, so that they change with the split into
    micro-batches."""

    reduction: type | None = None
    """The only reduction that the region is defined with, if there is one."""

    penalty: str | None = None
    """Setting that adds a term to the loss (`Decision.penalty`), or None. The term does not depend on the advantage, so
    a trainer that scales advantages does not scale it."""

    @property
    def fills(self) -> bool:
        """True if the region reads the policy's own top ids and fills in unrecorded values, so that no tail is left."""
        return self.own_topk in ("fill", "published")

    def __post_init__(self) -> None:
        if self.anchor not in self.anchors:
            raise ConfigError(
                f"Needs.anchors must contain the anchor {self.anchor!r}, got {sorted(self.anchors)}. "
                "Add it: distances are measured from the anchor."
            )


class Region:
    """Base class of region settings. Subclass it as a frozen dataclass and register its decision function."""

    __slots__ = ()
    kind: ClassVar[str]

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return Needs()


WhenStale = Literal["drop", "tighten"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRegion(Region):
    """Settings that every region shares: the treatment of tokens that old weights sampled."""

    max_staleness: int | None = None
    """n: the largest age of a token, in weight versions, that the region treats as fresh. None ignores ages. A value
    requires `RolloutTokens.version` and `PolicyTokens.version`."""

    when_stale: WhenStale = "drop"
    """`drop` removes tokens older than n from the gradient. `tighten` divides their bound δ by 1 + age − n, for regions
    that mask single tokens by a bound."""

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return False


def reads_ages(region: Region) -> TypeGuard[StalenessRegion]:
    """Returns whether a region reads the ages of tokens, so that records must hold versions."""
    return isinstance(region, StalenessRegion) and region.max_staleness is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBudget:
    """Prefix level: a response spends a divergence budget token by token."""

    kind: ClassVar[str] = "prefix-budget"

    last_weight: float = 0.8
    """w_min: weight of a response's last token. Weights fall linearly from 1 at the first token. arXiv:2606.10968."""

    rate: float | Literal["p90"] = "p90"
    """δ_b: budget that each token adds. `"p90"` is clamp(P90 of the response's D, low, high), for base models. For
    post-trained models the paper uses a fixed 0.015."""

    rate_low: float = 0.02
    rate_high: float = 0.04

    def __post_init__(self) -> None:
        validators.real("prefix-budget.last_weight", self.last_weight, rule="a weight in (0, 1]", low=0.0, high=1.0)
        if self.rate != "p90":
            validators.non_negative(
                "prefix-budget.rate", self.rate, advice="Or use 'p90' for the response's own quantile."
            )
        for name in ("rate_low", "rate_high"):
            validators.non_negative(f"prefix-budget.{name}", getattr(self, name))
        if self.rate_low > self.rate_high:
            raise ConfigError(
                f"prefix-budget.rate_low must be at most rate_high, got {self.rate_low!r} and {self.rate_high!r}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchoredRegion(StalenessRegion):
    """Settings shared by all anchored regions."""

    anchor: Anchor = "behavior"
    """b: the policy that distances are measured from. `behavior` is the sampler's record, `proximal` the trainer's."""

    correction: Correction | None = None
    """Correction of the mismatch π'/μ, multiplied onto the weight. Requires `anchor="proximal"`."""

    def axes(self) -> "TrustRegion":
        """Returns this region on the shared axes, without rules that the axes do not cover.

        `max_staleness` is not part of the point: it applies to the decision of any region.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be expressed on the shared axes.")

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return self.axes().needs()

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        try:
            return self.axes().masks_tokens()
        except NotImplementedError:
            return False


Direction = Literal["away", "symmetric"]
Level = Literal["token", "sequence", "sequence-max"] | PrefixBudget
Action = Literal["mask", "clip", "truncate", "penalise"]


def check_common(region: AnchoredRegion, max_ratio: float | None = None) -> None:
    """Validates the anchor, correction, cap and largest staleness of a region."""
    kind, anchor, correction = region.kind, region.anchor, region.correction
    check_staleness(region)
    validators.one_of(f"{kind}.anchor", anchor, ANCHORS)
    if correction is not None:
        validators.instance(f"{kind}.correction", correction, get_args(Correction))
        if anchor == "behavior":
            raise ConfigError(
                f"{kind}.correction must be None with anchor='behavior', got {correction!r}. "
                "π/μ already contains π'/μ, so the correction would apply the mismatch twice. "
                "Use anchor='proximal' with the correction, or remove the correction."
            )
    if max_ratio is not None:
        validators.real(f"{kind}.max_ratio", max_ratio, rule="a cap on the weight, > 0, or None", low=0.0)


def check_staleness(region: StalenessRegion) -> None:
    """Validates the treatment of stale tokens.

    Raises:
        ConfigError: If the region does not mask single tokens by a bound that could be tightened.
    """
    kind = region.kind
    validators.one_of(f"{kind}.when_stale", region.when_stale, ("drop", "tighten"))
    if region.max_staleness is not None:
        validators.whole(f"{kind}.max_staleness", region.max_staleness, low=0, advice="Or use None to ignore ages.")
    elif region.when_stale != "drop":
        raise ConfigError(
            f"{kind}.max_staleness must be given with when_stale={region.when_stale!r}, got None. "
            "Set the largest age that counts as fresh."
        )
    if region.when_stale == "tighten" and not region.masks_tokens():
        raise ConfigError(
            f"{kind}.when_stale must be 'drop', got 'tighten'. Only a region that masks single tokens by a bound can "
            "tighten it: dppo, ppo, ipo, kpop, minirl, or trust-region at level 'token' with action 'mask' or 'clip'."
        )


def needs_of(
    statistic: Statistic | None, anchor: Anchor, correction: Correction | None, *, sequences: bool = False
) -> Needs:
    """Returns the data that a statistic measured from this anchor needs, with an optional correction."""
    return Needs(
        anchors=frozenset({anchor}) if correction is None else frozenset({"behavior", "proximal"}),
        topk=statistic.k if isinstance(statistic, (TopKTV, TopKKL)) else 0,
        anchor=anchor,
        full=isinstance(statistic, (FullTV, FullKL)),
        sequences=sequences or reads_sequences(correction),
        reduction=SequenceMeanTokenMean if isinstance(statistic, SequenceRatio) else None,
    )


def differentiated(needs: Needs, *, k: int, tail_mass: float, full: bool) -> Needs:
    """Returns the needs of a region that differentiates the anchor's top k ids, or the whole vocabulary."""
    if full:
        return replace(needs, projects=True, full=True)
    return replace(needs, projects=True, topk=k, tail_mass=tail_mass)


@dataclass(frozen=True, slots=True)
class TrustRegion(AnchoredRegion):
    """General region: anchor × statistic × direction × level × action, each an independent choice."""

    kind: ClassVar[str] = "trust-region"

    statistic: Statistic | None
    """Distance of a token from the anchor, with its bounds. None only with `action="truncate"`."""

    direction: Direction = field(default="away", kw_only=True)
    """`away` masks a token only if the update pushes it further out; `symmetric` masks by distance alone."""

    level: Level = field(default="token", kw_only=True)
    """Level of the decision: per token, per sequence by the mean or maximum of D, or by a prefix budget."""

    action: Action = field(default="mask", kw_only=True)
    """`mask` masks the token; `clip` is the mask with PPO's textbook loss value; `truncate` only caps the weight;
    `penalise` adds a quadratic penalty. For projection use `TROLL`."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight, or None."""

    def __post_init__(self) -> None:
        check_common(self, self.max_ratio)
        validators.one_of(f"{self.kind}.direction", self.direction, ("away", "symmetric"))
        if not isinstance(self.level, PrefixBudget):
            validators.one_of(f"{self.kind}.level", self.level, ("token", "sequence", "sequence-max"))
        if self.action == "project":
            raise ConfigError("trust-region.action must not be 'project'. Use trustrl.TROLL for projection.")
        validators.one_of(f"{self.kind}.action", self.action, ("mask", "clip", "truncate", "penalise"))
        self._refuse_combinations()

    def _refuse_combinations(self) -> None:
        stat = self.statistic
        named = type(stat).__name__
        token_away = self.level == "token" and self.direction == "away"
        if self.action == "truncate":
            if stat is not None or not token_away:
                raise ConfigError(
                    "trust-region.action='truncate' must have statistic None, level 'token' and direction 'away', "
                    f"got {named}, {self.level!r} and {self.direction!r}. Truncation masks nothing. Use action='mask'."
                )
            return
        validators.instance("trust-region.statistic", stat, (Statistic,))
        if self.action == "clip" and not (isinstance(stat, Ratio) and token_away and self.max_ratio is None):
            raise ConfigError(
                "trust-region.action='clip' must go with Ratio, level 'token', direction 'away' and no max_ratio, "
                f"where the textbook objective is defined, got {named}, {self.level!r}, {self.direction!r} and "
                f"{self.max_ratio!r}. Use action='mask'."
            )
        if self.action == "penalise" and not (isinstance(stat, (Ratio, BinaryTV)) and token_away):
            raise ConfigError(
                "trust-region.action='penalise' must go with Ratio (SPO) or BinaryTV (DRPO), level 'token' and "
                f"direction 'away', got {named}, {self.level!r} and {self.direction!r}. "
                "Only these have a signed gap. Use action='mask'."
            )
        if self.action == "penalise" and (self.max_ratio is not None or getattr(stat, "act_on", "lower") == "upper"):
            raise ConfigError(
                "trust-region.action='penalise' must have no max_ratio and no act_on='upper', because its weight "
                f"follows from the objective, got {self.max_ratio!r} and {stat!r}. Use action='mask'."
            )
        if isinstance(stat, SequenceRatio) and self.level != "sequence":
            raise ConfigError(
                f"trust-region.level must be 'sequence' with SequenceRatio, got {self.level!r}. "
                "A sequence has one mean ratio. Use Ratio for decisions per token."
            )
        if isinstance(self.level, PrefixBudget):
            if self.direction != "away":
                raise ConfigError(
                    "trust-region.direction must be 'away' at prefix level, got 'symmetric'. "
                    "Only updates that push a token outward spend the budget."
                )
            if not isinstance(stat, Divergence) or stat.max_increase != stat.max_decrease:
                raise ConfigError(
                    "trust-region.statistic must be a divergence with equal bounds at prefix level, "
                    f"got {stat!r}. Give one bound for both directions."
                )

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return self.level == "token" and self.action in ("mask", "clip")

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(self.statistic, self.anchor, self.correction, sequences=self.level != "token")
