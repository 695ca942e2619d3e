r"""The general region: a point on the shared axes, each an independent choice.

    anchor × statistic × direction × level × action

    M = 0  iff  D > δ at the token or over its sequence, and with direction "away" the update pushes it further out
    w = min(r, C),   r = π/b,   ℓ = −sg(M w) A log π

Combinations without a meaning raise. Most published regions are points on these axes (their `axes`). The action
"truncate" masks nothing, and "penalize" replaces mask and weight by SPO's quadratic penalty.

There is no paper: the axes are ours.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import Needs, PrefixBudget
from trustrl.config.statistics import BinaryTV, Divergence, Ratio, SequenceRatio, Statistic
from trustrl.errors import ConfigError
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.words import anchor_of, beyond, bounds_in_words, capped, measure_in_words, number

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal["away", "symmetric"]
Level = Literal["token", "sequence", "sequence-max"] | PrefixBudget
Action = Literal["mask", "clip", "truncate", "penalize"]


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
    `penalize` adds a quadratic penalty. For projection use `TROLL`."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight, or None."""

    def __post_init__(self) -> None:
        check_common(self, self.max_ratio)
        validators.one_of(f"{self.kind}.direction", self.direction, ("away", "symmetric"))
        if not isinstance(self.level, PrefixBudget):
            validators.one_of(f"{self.kind}.level", self.level, ("token", "sequence", "sequence-max"))
        if self.action == "project":
            raise ConfigError("trust-region.action must not be 'project'. Use trustrl.regions.TROLL for projection.")
        action: str = self.action
        if action == "penalise":
            warnings.warn(
                "trust-region.action='penalise' is now spelled 'penalize'. The old spelling will be removed in release "
                "0.3.",
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "action", "penalize")
        validators.one_of(f"{self.kind}.action", self.action, ("mask", "clip", "truncate", "penalize"))
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
        if self.action == "penalize" and not (isinstance(stat, (Ratio, BinaryTV)) and token_away):
            raise ConfigError(
                "trust-region.action='penalize' must go with Ratio (SPO) or BinaryTV (DRPO), level 'token' and "
                f"direction 'away', got {named}, {self.level!r} and {self.direction!r}. "
                "Only these have a signed gap. Use action='mask'."
            )
        if self.action == "penalize" and (self.max_ratio is not None or getattr(stat, "act_on", "lower") == "upper"):
            raise ConfigError(
                "trust-region.action='penalize' must have no max_ratio and no act_on='upper', because its weight "
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

    def axes(self) -> "TrustRegion":
        """Returns the region itself."""
        return self

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks, clips, caps or penalizes by the statistic, at the level of the decision."""
        from trustrl.regions import cppo, spo  # on use, because their `axes` return this class

        statistic, log_ratio = self.statistic, tokens.log_ratio
        if statistic is None:
            return ops.masked(tokens, max_ratio=self.max_ratio)
        if self.action == "penalize":
            max_decrease, max_increase = statistic.bounds
            width = ops.either(log_ratio > 0, max_increase, max_decrease, like=log_ratio)
            gap = log_ratio.expm1() if isinstance(statistic, Ratio) else ops.probability_gap(tokens)
            return spo.penalized(tokens, gap, width)
        if isinstance(self.level, PrefixBudget):
            by = ops.measured(tokens, statistic)
            return ops.masked(tokens, cppo.beyond_budget(tokens, by, self.level), by, max_ratio=self.max_ratio)
        if self.level == "token":
            return self._masked(tokens, ops.measured(tokens, statistic), log_ratio)
        drift = ops.sequence_mean(tokens, log_ratio)
        if isinstance(statistic, SequenceRatio):
            return self._masked(tokens, ops.measured(tokens, statistic), drift, side=drift, log_weight=drift)
        over = ops.sequence_mean if self.level == "sequence" else ops.sequence_max
        return self._masked(tokens, ops.measured(tokens, statistic, over=over), drift, side=drift)

    def _masked(self, tokens: ops.Tokens, by: ops.Measured, sign: Tensor, **more: Tensor) -> ops.Decision:
        """Returns the mask by a distance, in this region's direction. The sign selects the bound."""
        from trustrl.regions import dppo, ipo, ppo

        if self.direction == "symmetric":
            mask = ipo.outside(by.distance, sign, **by.bounds)
        else:
            mask = dppo.leaving(by.distance, sign, tokens.advantage, **by.bounds)
        if self.action == "clip":
            more["value"] = ppo.clipped_objective(tokens.log_ratio, tokens.advantage, **by.per_token_bounds)
        return ops.masked(tokens, mask, by, max_ratio=self.max_ratio, **more)

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return self.level == "token" and self.action in ("mask", "clip")

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(self.statistic, self.anchor, self.correction, sequences=self.level != "token")

    def words(self) -> str:
        """Describes what the region does to a token."""
        b, statistic = anchor_of(self), self.statistic
        if statistic is None:
            return "Masks nothing; " + (
                f"every token's weight is π/{b}." if self.max_ratio is None
                else f"weights π/{b} are capped at {number(self.max_ratio)}."
            )  # fmt: skip
        if self.action == "penalize":
            what, unit = measure_in_words(statistic, b)
            return f"Masks nothing; reverses the gradient once {what} exceeds {bounds_in_words(statistic)} ({unit})."
        too_far, outward = beyond(statistic, b), ""
        if self.direction == "away":
            outward = " and the update pushes it further out"
        if isinstance(self.level, PrefixBudget):
            what, unit = measure_in_words(statistic, b)
            spent = f"{what}, {bounds_in_words(statistic)} ({unit}),"
            text = f"Masks a token once its response has spent its budget of {spent}{outward}."
        elif self.level == "token":
            text = f"Masks a token once {too_far}{outward}."
        else:
            over = (
                ""
                if statistic.kind == "sequence-ratio"
                else {"sequence": "mean ", "sequence-max": "largest "}[self.level]
            )
            text = f"Masks a whole sequence once its {over}{too_far}{outward}."
        return text + capped(self.max_ratio, b)


PRESETS = {}  # `dis.py` and `flash_reinforce.py` have presets of this class
