r"""TROLL: projects each token's distribution onto a KL ball around the anchor b, differentiably.

    π̂ = argmin_q KL(q‖π)  s.t.  KL(q‖b) ≤ ε
    ℓ = −A·π̂(a)/b(a) + α·KL(π‖sg π̂)

`trustrl.core.projection` solves for π̂, with its gradient in closed form. At level "sequence" the ratio is the geometric
mean of π̂(a)/b(a) over the response, as in GSPO.

Reference: TROLL: Trust Regions improve Reinforcement Learning for Large Language Models, arXiv:2510.03817.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor
from trustrl.config.terms import SequenceMeanTokenMean
from trustrl.errors import ConfigError
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, differentiated, needs_of
from trustrl.regions.words import anchor_of, number


@dataclass(frozen=True, slots=True)
class TROLL(AnchoredRegion):
    """TROLL: projects each token's distribution onto a KL ball around the anchor, differentiably. arXiv:2510.03817."""

    kind: ClassVar[str] = "troll"

    bound: float = 0.05
    """ε: the largest KL(π̂‖b), in nats."""

    alpha: float = field(default=1.0, kw_only=True)
    """α: weight of KL(π‖sg π̂), which pulls the network toward its projection."""

    k: int = field(default=64, kw_only=True)
    """Number of the anchor's most probable ids with a cell each (sparse form)."""

    tail_mass: float = field(default=1e-5, kw_only=True)
    """Largest anchor mass that a record with fewer than k columns may leave out. Tokens that leave out more are dropped
    and counted as `fault_narrow`. Not used with k columns or more."""

    anchor: Anchor = field(default="proximal", kw_only=True)
    """π' in the paper; `behavior` projects around the policy that sampled."""

    support: Literal["topk", "full"] = field(default="topk", kw_only=True)
    """`topk`: cells are the recorded ids, the sampled token and one bucket for the rest. `full`: the vocabulary."""

    rest: Literal["bucket", "fill", "published"] = field(default="bucket", kw_only=True)
    """Treatment of unrecorded ids. `bucket` is one cell that carries gradient. The others are for comparison:
    `published` keeps of each policy its own top ids up to a mass of 1 − tail_mass, joins both sets and sets a policy to
    1e-12 at ids that only the other one keeps, as the paper does; `fill` sets only the anchor to 1e-12, at the policy's
    own top ids. Both ignore all other ids, and normalize both sides over the cells before they are divided."""

    level: Literal["token", "sequence"] = field(default="token", kw_only=True)
    """Ratio in the objective: `token` is π̂(a)/b(a); `sequence` is its geometric mean over the response, as in GSPO."""

    def __post_init__(self) -> None:
        validators.one_of("troll.level", self.level, ("token", "sequence"))
        validators.real("troll.bound", self.bound, rule="nats in (0, 1e3]", low=0.0, high=1e3)
        validators.non_negative("troll.alpha", self.alpha)
        validators.non_negative("troll.tail_mass", self.tail_mass)
        if self.tail_mass >= 1:
            raise ConfigError(f"troll.tail_mass must be a mass below 1, got {self.tail_mass!r}. The paper uses 1e-5.")
        validators.whole("troll.k", self.k, low=1)
        validators.one_of("troll.support", self.support, ("topk", "full"))
        validators.one_of("troll.rest", self.rest, ("bucket", "fill", "published"))
        if self.support == "full" and self.rest != "bucket":
            raise ConfigError(
                f"troll.rest must be 'bucket' with support='full', got {self.rest!r}. The full support has no "
                "unrecorded ids."
            )
        check_common(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Projects tokens outside the ball. Every token has the term, including those with A = 0."""
        select = self.needs().fills
        projected = ops.project_tokens(tokens, bound=self.bound, alpha=self.alpha, select=select)
        log_weight = projected.log_weight
        if self.level == "sequence":
            log_weight = ops.sequence_mean(tokens, log_weight)
        weight = log_weight.exp()
        return ops.Decision(
            ops.keep_all(tokens),
            weight,
            projected.logp,
            value=weight * tokens.advantage,
            penalty=projected.pull,
            extra=projected.numbers,
        )

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        by_sequence, full = self.level == "sequence", self.support == "full"
        needs = needs_of(None, self.anchor, self.correction, sequences=by_sequence)
        return replace(
            differentiated(needs, k=self.k, tail_mass=self.tail_mass, full=full),
            own_topk="none" if full else "known" if self.rest == "bucket" else self.rest,
            reduction=SequenceMeanTokenMean if by_sequence else None,
            penalty="alpha" if self.alpha else None,
        )

    def words(self) -> str:
        """Describes what the region does to a token."""
        b = anchor_of(self)
        over = "the whole vocabulary" if self.support == "full" else f"the {self.k} most probable tokens of {b}"
        return (
            f"Masks nothing; projects a token's distribution onto KL(π̂‖{b}) ≤ {number(self.bound)} nats over {over}, "
            f"and pulls the network towards it with weight {number(self.alpha)}."
        ) + (f" The weight is the geometric mean of π̂/{b} over the response." if self.level == "sequence" else "")


PRESETS = {"troll": TROLL, "troll-gspo": lambda: TROLL(level="sequence")}
