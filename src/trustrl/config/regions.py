"""Settings of the published trust regions, with the source of each default.

Most regions are points on the shared axes (`axes()`). The others add a rule that the axes do not cover.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import (
    AnchoredRegion,
    Needs,
    Region,
    StalenessRegion,
    TrustRegion,
    check_common,
    check_staleness,
    differentiated,
    needs_of,
)
from trustrl.config.score_centering import ScoreCentering
from trustrl.config.sequence_regions import CPPO, GMPO, GSPO, OPSM, TRM, VESPO
from trustrl.config.soft_regions import DRPO, SAPO, SPO
from trustrl.config.statistics import (
    Anchor,
    BinaryTV,
    Divergence,
    Ratio,
    SymmetricBinaryKL,
)
from trustrl.config.terms import SequenceMeanTokenMean
from trustrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DPPO(AnchoredRegion):
    """DPPO: masks a token that has left the divergence ball if the update pushes it further. arXiv:2602.04879, eq. 12.

    The mask and the weight are anchored on μ, as in the paper. The paper's ablation that collapses (figure 4) masks by
    π' and keeps the weight π/μ: use the preset `dppo-decoupled`. `anchor="proximal"` alone moves both to π'.
    """

    kind: ClassVar[str] = "dppo"

    divergence: Divergence = field(default_factory=BinaryTV)
    """Divergence *and* thresholds. Paper: TV 0.15 (sanity, LoRA) or 0.2 (8B and 30B runs), KL 0.05, K = 20."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on π/b. Off by default. The paper's scaling runs use 5, and show that 3 fails."""

    def __post_init__(self) -> None:
        validators.instance("dppo.divergence", self.divergence, (Divergence,))
        check_common(self, self.max_ratio)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, max_ratio=self.max_ratio, correction=self.correction)


@dataclass(frozen=True, slots=True)
class PPO(AnchoredRegion):
    """PPO's clip, as a mask on |r − 1| with the same gradient as min/clip."""

    kind: ClassVar[str] = "ppo"

    ratio: Ratio = field(default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28))
    """(0.2, 0.28) is clip-higher; (0.2, 0.2) is the classic clip."""

    action: Literal["mask", "clip"] = field(default="mask", kw_only=True)
    """`clip` reports the textbook min/clip loss value. The gradient is the same."""

    dual_clip: float | None = field(default=None, kw_only=True)
    """c: also mask tokens with A < 0 and r > c. Off by default; a common value is 3."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of unmasked tokens."""

    relax_below: float | None = field(default=None, kw_only=True)
    """α: tokens with an anchor probability below it are never clipped. Off by default; 0.1 to 0.7 in arXiv:2602.04879,
    section 6, which shows by it that PPO's clip hinders improbable tokens."""

    def __post_init__(self) -> None:
        validators.instance("ppo.ratio", self.ratio, (Ratio,))
        validators.one_of("ppo.action", self.action, ("mask", "clip"))
        check_common(self, self.max_ratio)
        self.axes()
        if self.dual_clip is not None:
            validators.real("ppo.dual_clip", self.dual_clip, rule="a ratio > 1, or None", low=1.0)
        if self.relax_below is not None:
            validators.real(
                "ppo.relax_below", self.relax_below, rule="a probability in (0, 1], or None", low=0.0, high=1.0
            )

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            self.ratio, anchor=self.anchor, action=self.action, max_ratio=self.max_ratio, correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class CISPO(AnchoredRegion):
    """CISPO: caps importance weights and masks nothing, w = min(r, C). arXiv:2506.13585."""

    kind: ClassVar[str] = "cispo"

    max_ratio: float = 5.0
    """C: 5, as in ScaleRL and in DPPO's scaling runs."""

    def __post_init__(self) -> None:
        validators.real(
            "cispo.max_ratio", self.max_ratio, rule="a cap on the weight, > 0", low=0.0, advice="For no cap use pg-is."
        )
        check_common(self)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            None, anchor=self.anchor, action="truncate", max_ratio=self.max_ratio, correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class PolicyGradient(AnchoredRegion):
    """Unconstrained baseline: importance-weighted policy gradient, w = r, without a mask."""

    kind: ClassVar[str] = "pg-is"

    def __post_init__(self) -> None:
        check_common(self)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(None, anchor=self.anchor, action="truncate", correction=self.correction)


@dataclass(frozen=True, slots=True)
class IPO(AnchoredRegion):
    """IPO: a symmetric mask on the sampled token's probability gap, as in prime-rl."""

    kind: ClassVar[str] = "ipo"

    divergence: BinaryTV = field(default_factory=lambda: BinaryTV(max_increase=0.3))
    """prime-rl uses 0.3 since September 2026, and 0.1 before."""

    log_ratio_penalty: float = field(default=0.0, kw_only=True)
    """τ: adds τ·log² r to the loss of every token, with gradient. Off by default."""

    def __post_init__(self) -> None:
        validators.instance("ipo.divergence", self.divergence, (BinaryTV,))
        validators.non_negative("ipo.log_ratio_penalty", self.log_ratio_penalty)
        check_common(self)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return replace(self.axes().needs(), penalty="log_ratio_penalty" if self.log_ratio_penalty else None)


@dataclass(frozen=True, slots=True)
class KPOP(AnchoredRegion):
    """KPop: a symmetric mask on the larger of the two binary KLs."""

    kind: ClassVar[str] = "kpop"

    divergence: SymmetricBinaryKL = field(default_factory=SymmetricBinaryKL)
    """φ = 2.0 nats."""

    def __post_init__(self) -> None:
        validators.instance("kpop.divergence", self.divergence, (SymmetricBinaryKL,))
        check_common(self)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)


@dataclass(frozen=True, slots=True)
class MiniRL(StalenessRegion):
    """MiniRL: PPO's mask on the trainer's drift π/π', and the weight w = min(π/μ, C). arXiv:2512.01374."""

    kind: ClassVar[str] = "minirl"

    ratio: Ratio = field(default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28))
    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight. Off by default."""

    def __post_init__(self) -> None:
        validators.instance("minirl.ratio", self.ratio, (Ratio,))
        check_staleness(self)
        if self.max_ratio is not None:
            validators.real("minirl.max_ratio", self.max_ratio, rule="a cap on the weight, > 0, or None", low=0.0)

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return True

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return Needs(anchors=frozenset({"behavior", "proximal"}), anchor="proximal")


@dataclass(frozen=True, slots=True)
class M2PO(AnchoredRegion):
    """M2PO: masks the outward tokens with the largest log-ratios until their second moment is small. arXiv:2510.01161.

    The second moment is that of the tokens in one call. Over a split batch it stays below the bound too, and at least
    as many tokens are masked.
    """

    kind: ClassVar[str] = "m2po"

    max_second_moment: float = 0.04
    """τ: the largest mean of log² r over the kept tokens that the update pushes outward. The paper uses 0.04."""

    def __post_init__(self) -> None:
        validators.real("m2po.max_second_moment", self.max_second_moment, rule="nats squared, > 0", low=0.0)
        check_common(self)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return replace(needs_of(None, self.anchor, self.correction), whole_call=True)


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

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        by_sequence, full = self.level == "sequence", self.support == "full"
        found = needs_of(None, self.anchor, self.correction, sequences=by_sequence)
        return replace(
            differentiated(found, k=self.k, tail_mass=self.tail_mass, full=full),
            own_topk="none" if full else "known" if self.rest == "bucket" else self.rest,
            reduction=SequenceMeanTokenMean if by_sequence else None,
            penalty="alpha" if self.alpha else None,
        )


REGIONS: tuple[type[Region], ...] = (
    TrustRegion, DPPO, TROLL, PPO, GSPO, CISPO, SAPO, SPO, DRPO, CPPO, IPO, KPOP, TRM, MiniRL, PolicyGradient,
    GMPO, OPSM, VESPO, M2PO, ScoreCentering,
)  # fmt: skip
