"""The axes every region is a point on, and what a region needs to be given.

anchor × statistic × direction × level × action, each an independent choice; combinations without a meaning are
refused by name.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from trustrl.config import checks
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
from trustrl.config.terms import MIS, TIS, Correction, IcePop, SequenceMeanTokenMean
from trustrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a region must be given: engines read it to know what to record, `policy_loss` to refuse early."""

    anchors: frozenset[Anchor] = frozenset({"behavior"})
    """Whose log-probs of the sampled token are needed: b's, and both for a correction of the mismatch."""

    topk: int = 0
    """How many of the anchor's most probable ids to record with their log-probs; 0 for none."""

    anchor: Anchor = "behavior"
    """b: the policy distances are taken from; the top-K and the full distribution must be its own."""

    tail_mass: float = 0.0
    """A recorder may stop before `topk` ids once the anchor's remaining mass is below this."""

    own_topk: Literal["none", "known", "fill"] = "none"
    """Whether the policy's own top ids join the recorded ones: never, where the anchor is known there, or filled."""

    projects: bool = False
    """True when the region differentiates through the whole support, not only through the sampled token."""

    full: bool = False
    """True when the whole distribution (or an exact divergence made from it) is needed."""

    sequences: bool = False
    """True when the verdict depends on a whole sequence, so that calls may be split only between sequences."""

    reduction: type | None = None
    """The one reduction the region is defined with, if there is only one."""

    penalty: str | None = None
    """The setting behind a term of the region's own beside the policy's (`Decision.penalty`); None where there is none.
    The term does not follow the advantage, so that a trainer which scales advantages would not scale it."""

    def __post_init__(self) -> None:
        if self.anchor not in self.anchors:
            raise ConfigError(
                f"Needs.anchors must contain the anchor {self.anchor!r}, got {sorted(self.anchors)}. "
                "The region is measured from it."
            )


class Region:
    """Base of every region's settings. Third parties subclass it as a frozen dataclass and register how it decides."""

    __slots__ = ()
    kind: ClassVar[str]

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return Needs()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBudget:
    """The prefix level: a response may spend divergence token by token, and what it spent early is not there later."""

    kind: ClassVar[str] = "prefix-budget"

    last_weight: float = 0.8
    """w_min: the weight of a response's last token; the first has 1, the others lie on a line. arXiv:2606.10968."""

    rate: float | Literal["p90"] = "p90"
    """δ_b: how much budget a token adds. `"p90"` is clamp(P90 of the response's D, low, high), for base models; .015
    fixed is the paper's choice for post-trained models."""

    rate_low: float = 0.02
    rate_high: float = 0.04

    def __post_init__(self) -> None:
        checks.real("prefix-budget.last_weight", self.last_weight, rule="a weight in (0, 1]", low=0.0, high=1.0)
        if self.rate != "p90":
            checks.non_negative(
                "prefix-budget.rate", self.rate, advice="Or write 'p90' for the response's own quantile."
            )
        for name in ("rate_low", "rate_high"):
            checks.non_negative(f"prefix-budget.{name}", getattr(self, name))
        if self.rate_low > self.rate_high:
            raise ConfigError(
                f"prefix-budget.rate_low must be at most rate_high, got {self.rate_low!r} and {self.rate_high!r}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchoredRegion(Region):
    """Settings every anchored region shares."""

    anchor: Anchor = "behavior"
    """b: the policy distances are taken from. `behavior` is the sampler's own record, `proximal` the trainer's."""

    correction: Correction | None = None
    """A correction of π'/μ, multiplied on top; only with `anchor="proximal"`."""

    def axes(self) -> "TrustRegion":
        """This region on the shared axes; rules that lie beside the axes are added when it is built."""
        raise NotImplementedError(f"{type(self).__name__} is no point on the shared axes.")

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return self.axes().needs()


Direction = Literal["away", "symmetric"]
Level = Literal["token", "sequence", "sequence-max"] | PrefixBudget
Action = Literal["mask", "clip", "truncate", "penalise"]


def check_common(kind: str, anchor: str, correction: Correction | None, max_ratio: float | None = None) -> None:
    """Refuses an anchor, correction or cap that no region may have."""
    checks.one_of(f"{kind}.anchor", anchor, ANCHORS)
    if correction is not None:
        checks.instance(f"{kind}.correction", correction, (TIS, IcePop, MIS))
        if anchor == "behavior":
            raise ConfigError(
                f"{kind}.correction must be None with anchor='behavior', got {correction!r}. "
                "π/μ already contains π'/μ: correcting it again would count the mismatch twice. "
                "Use anchor='proximal' with the correction, or drop the correction."
            )
    if max_ratio is not None:
        checks.real(f"{kind}.max_ratio", max_ratio, rule="a cap on the weight, > 0, or None", low=0.0)


def needs_of(
    statistic: Statistic | None, anchor: Anchor, correction: Correction | None, *, sequences: bool = False
) -> Needs:
    """What a statistic taken from this anchor needs, with the correction beside it."""
    return Needs(
        anchors=frozenset({anchor}) if correction is None else frozenset({"behavior", "proximal"}),
        topk=statistic.k if isinstance(statistic, (TopKTV, TopKKL)) else 0,
        anchor=anchor,
        full=isinstance(statistic, (FullTV, FullKL)),
        sequences=sequences or (isinstance(correction, MIS) and correction.level == "sequence"),
        reduction=SequenceMeanTokenMean if isinstance(statistic, SequenceRatio) else None,
    )


@dataclass(frozen=True, slots=True)
class TrustRegion(AnchoredRegion):
    """The general region: anchor × statistic × direction × level × action, each an independent choice."""

    kind: ClassVar[str] = "trust-region"

    statistic: Statistic | None
    """How far a token has moved, with its bounds. None only with `action="truncate"`, which measures nothing."""

    direction: Direction = field(default="away", kw_only=True)
    """`away` stops a token only if the update pushes it further out; `symmetric` looks at the distance alone."""

    level: Level = field(default="token", kw_only=True)
    """Where the verdict is taken: per token; per sequence by the mean or the maximum of D; or by a prefix budget."""

    action: Action = field(default="mask", kw_only=True)
    """`mask` stops the gradient; `clip` is the mask with PPO's textbook loss value; `truncate` only caps the weight;
    `penalise` bends the objective back quadratically. Projection has settings of its own: `TROLL`."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight. None leaves it free."""

    def __post_init__(self) -> None:
        check_common(self.kind, self.anchor, self.correction, self.max_ratio)
        checks.one_of(f"{self.kind}.direction", self.direction, ("away", "symmetric"))
        if not isinstance(self.level, PrefixBudget):
            checks.one_of(f"{self.kind}.level", self.level, ("token", "sequence", "sequence-max"))
        if self.action == "project":
            raise ConfigError(
                "trust-region.action must not be 'project': projection has its own settings. Use trustrl.TROLL."
            )
        checks.one_of(f"{self.kind}.action", self.action, ("mask", "clip", "truncate", "penalise"))
        self._refuse_combinations()

    def _refuse_combinations(self) -> None:
        stat = self.statistic
        named = type(stat).__name__
        token_away = self.level == "token" and self.direction == "away"
        if self.action == "truncate":
            if stat is not None or not token_away:
                raise ConfigError(
                    "trust-region.action='truncate' must have statistic None, level 'token' and direction 'away', "
                    f"got {named}, {self.level!r} and {self.direction!r}. It stops nothing: use 'mask'."
                )
            return
        checks.instance("trust-region.statistic", stat, (Statistic,))
        if self.action == "clip" and not (isinstance(stat, Ratio) and token_away and self.max_ratio is None):
            raise ConfigError(
                "trust-region.action='clip' must go with Ratio, level 'token', direction 'away' and no max_ratio: the "
                f"textbook objective exists only there, got {named}, {self.level!r}, {self.direction!r} and "
                f"{self.max_ratio!r}. Use action='mask'."
            )
        if self.action == "penalise" and not (isinstance(stat, (Ratio, BinaryTV)) and token_away):
            raise ConfigError(
                "trust-region.action='penalise' must go with Ratio (SPO) or BinaryTV (DRPO), level 'token' and "
                f"direction 'away', got {named}, {self.level!r} and {self.direction!r}. Only these have a signed gap."
            )
        if self.action == "penalise" and (self.max_ratio is not None or getattr(stat, "act_on", "lower") == "upper"):
            raise ConfigError(
                "trust-region.action='penalise' must have no max_ratio and no act_on='upper': its weight follows from "
                f"the objective, got {self.max_ratio!r} and {stat!r}. Use action='mask'."
            )
        if isinstance(stat, SequenceRatio) and self.level != "sequence":
            raise ConfigError(
                f"trust-region.level must be 'sequence' with SequenceRatio, got {self.level!r}. "
                "One mean ratio is one verdict per sequence; use Ratio for token verdicts."
            )
        if isinstance(self.level, PrefixBudget):
            if self.direction != "away":
                raise ConfigError(
                    "trust-region.direction must be 'away' at prefix level, got 'symmetric'. "
                    "The budget is spent only by updates that push outwards."
                )
            if not isinstance(stat, Divergence) or stat.max_increase != stat.max_decrease:
                raise ConfigError(
                    "trust-region.statistic must be a divergence with equal bounds at prefix level, "
                    f"got {stat!r}. A budget has one size."
                )

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return needs_of(self.statistic, self.anchor, self.correction, sequences=self.level != "token")
