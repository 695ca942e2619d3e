"""The published trust regions, one frozen object each, defaults with their source. No torch: settings load without it.

Most are points on the shared axes (their `axes()`); the others add a rule of their own.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from trustrl.config import checks
from trustrl.config.axes import AnchoredRegion, Needs, PrefixBudget, Region, TrustRegion, check_common, needs_of
from trustrl.config.statistics import (
    Anchor,
    BinaryTV,
    Divergence,
    Ratio,
    SampledK2,
    SampledK3,
    SequenceRatio,
    Statistic,
    SymmetricBinaryKL,
    TopKKL,
    TopKTV,
)
from trustrl.config.terms import MIS
from trustrl.errors import ConfigError, TrustRLWarning


@dataclass(frozen=True, slots=True)
class DPPO(AnchoredRegion):
    """Divergence PPO: stop a token that has left the divergence ball and is pushed further. arXiv:2602.04879, eq. 12.

    Anchored on μ as in the paper, for the mask and for the weight. The paper's ablation that collapses (figure 4) masks
    by π' and keeps the weight π/μ: the preset `dppo-decoupled`. `anchor="proximal"` alone moves both to π'.
    """

    kind: ClassVar[str] = "dppo"

    divergence: Divergence = field(default_factory=BinaryTV)
    """The divergence *and* its thresholds. Paper: TV .15 (sanity, LoRA) or .2 (8B and 30B runs), KL .05, K 20."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on π/b. Off by default; the paper's scaling runs use 5, and show 3 failing."""

    def __post_init__(self) -> None:
        checks.instance("dppo.divergence", self.divergence, (Divergence,))
        check_common(self.kind, self.anchor, self.correction, self.max_ratio)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, max_ratio=self.max_ratio, correction=self.correction)


@dataclass(frozen=True, slots=True)
class PPO(AnchoredRegion):
    """PPO's clip as the mask it is: same gradient as min/clip, on |r − 1|."""

    kind: ClassVar[str] = "ppo"

    ratio: Ratio = field(default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28))
    """(.2, .28) is clip-higher; (.2, .2) is the classic clip."""

    action: Literal["mask", "clip"] = field(default="mask", kw_only=True)
    """`clip` reports the textbook min/clip loss value; the gradient is the same."""

    dual_clip: float | None = field(default=None, kw_only=True)
    """c: also stop a token with A < 0 and r > c. Off by default; 3 where it is used."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of the tokens that are kept."""

    def __post_init__(self) -> None:
        checks.instance("ppo.ratio", self.ratio, (Ratio,))
        checks.one_of("ppo.action", self.action, ("mask", "clip"))
        check_common(self.kind, self.anchor, self.correction, self.max_ratio)
        self.axes()
        if self.dual_clip is not None:
            checks.real("ppo.dual_clip", self.dual_clip, rule="a ratio > 1, or None", low=1.0)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(
            self.ratio, anchor=self.anchor, action=self.action, max_ratio=self.max_ratio, correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class GSPO(AnchoredRegion):
    """Group sequence policy optimisation: one ratio per sequence, its geometric mean. arXiv:2507.18071."""

    kind: ClassVar[str] = "gspo"

    ratio: SequenceRatio = field(default_factory=lambda: SequenceRatio(max_decrease=3e-4, max_increase=4e-4))
    """(3e-4, 4e-4), the paper's. A mean over hundreds of tokens hardly moves: .2 would never stop anything."""

    def __post_init__(self) -> None:
        checks.instance("gspo.ratio", self.ratio, (SequenceRatio,))
        check_common(self.kind, self.anchor, self.correction)
        for name, bound in zip(("max_decrease", "max_increase"), self.ratio.bounds, strict=True):
            if 0.01 < bound < float("inf"):
                warnings.warn(
                    f"gspo.{name} = {bound:g} is {bound / 4e-4:,.0f} times the published 4e-4: the mean log-ratio over "
                    f"a whole sequence would have to reach {bound:g} per token before anything stops. "
                    "A token-level bound such as .2 belongs to `ppo`.",
                    TrustRLWarning,
                    stacklevel=3,
                )

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(self.ratio, anchor=self.anchor, level="sequence", correction=self.correction)


@dataclass(frozen=True, slots=True)
class CISPO(AnchoredRegion):
    """Clipped importance-sampling weights, nothing stopped: w = min(r, C). arXiv:2506.13585."""

    kind: ClassVar[str] = "cispo"

    max_ratio: float = 5.0
    """C; 5 as in ScaleRL and in DPPO's scaling runs."""

    def __post_init__(self) -> None:
        checks.real(
            "cispo.max_ratio", self.max_ratio, rule="a cap on the weight, > 0", low=0.0, advice="None is pg-is."
        )
        check_common(self.kind, self.anchor, self.correction)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(
            None, anchor=self.anchor, action="truncate", max_ratio=self.max_ratio, correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class PolicyGradient(AnchoredRegion):
    """The unconstrained baseline: importance-weighted policy gradient, w = r, nothing stopped."""

    kind: ClassVar[str] = "pg-is"

    def __post_init__(self) -> None:
        check_common(self.kind, self.anchor, self.correction)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(None, anchor=self.anchor, action="truncate", correction=self.correction)


@dataclass(frozen=True, slots=True)
class SAPO(AnchoredRegion):
    """Soft adaptive policy optimisation: a sigmoid gate on the ratio instead of an edge. arXiv:2511.20347."""

    kind: ClassVar[str] = "sapo"

    temperature_positive: float = 1.0
    """τ for A > 0."""

    temperature_negative: float = 1.05
    """τ for A ≤ 0; slightly sharper, as published."""

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            checks.real(f"sapo.{name}", getattr(self, name), rule="a finite number > 0", low=0.0, high=1e6)
        check_common(self.kind, self.anchor, self.correction)

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)


@dataclass(frozen=True, slots=True)
class SPO(AnchoredRegion):
    """Simple policy optimisation: a quadratic penalty on r − 1. arXiv:2401.16025."""

    kind: ClassVar[str] = "spo"

    width: float = 0.2
    """ε: the objective's top lies at |r − 1| = ε. Our default."""

    def __post_init__(self) -> None:
        checks.real("spo.width", self.width, rule="a distance of the ratio from 1, > 0", low=0.0, high=1e6)
        check_common(self.kind, self.anchor, self.correction)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(
            Ratio(max_increase=self.width), anchor=self.anchor, action="penalise", correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class DRPO(AnchoredRegion):
    """A quadratic penalty on the probability gap π − b. arXiv:2606.09821."""

    kind: ClassVar[str] = "drpo"

    width: float = 0.2
    """δ: the objective's top lies at |π − b| = δ. Ours; the published code states 12.5, which does next to nothing."""

    def __post_init__(self) -> None:
        checks.real("drpo.width", self.width, rule="a probability gap > 0", low=0.0, high=1e6)
        check_common(self.kind, self.anchor, self.correction)
        if self.width > 1:
            warnings.warn(
                f"drpo.width = {self.width:g}: a probability gap never exceeds 1, so the factor on the gradient stays "
                f"in [{1 - 1 / self.width:.2f}, {1 + 1 / self.width:.2f}] and holds nothing back. "
                "A width below 1 acts; .2 is our default.",
                TrustRLWarning,
                stacklevel=3,
            )

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)


@dataclass(frozen=True, slots=True)
class CPPO(AnchoredRegion):
    """Cumulative budget over a response: early tokens spend what later ones may not. arXiv:2606.10968, eq. 8-10."""

    kind: ClassVar[str] = "cppo"

    divergence: Divergence = field(default_factory=TopKTV)
    """Top-20 TV at δ = .15 for dense models; .2 for mixtures of experts."""

    budget: PrefixBudget = field(default_factory=PrefixBudget, kw_only=True)
    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of the tokens that are kept."""

    def __post_init__(self) -> None:
        checks.instance("cppo.divergence", self.divergence, (Divergence,))
        checks.instance("cppo.budget", self.budget, (PrefixBudget,))
        self.axes()

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(
            self.divergence,
            anchor=self.anchor,
            level=self.budget,
            max_ratio=self.max_ratio,
            correction=self.correction,
        )


@dataclass(frozen=True, slots=True)
class IPO(AnchoredRegion):
    """A symmetric mask on the sampled token's probability gap, as prime-rl runs it."""

    kind: ClassVar[str] = "ipo"

    divergence: BinaryTV = field(default_factory=lambda: BinaryTV(max_increase=0.3))
    """.3 since September 2026; .1 before."""

    log_ratio_penalty: float = field(default=0.0, kw_only=True)
    """τ: adds τ·log² r to the loss of every token, differentiated. Off by default."""

    def __post_init__(self) -> None:
        checks.instance("ipo.divergence", self.divergence, (BinaryTV,))
        checks.non_negative("ipo.log_ratio_penalty", self.log_ratio_penalty)
        check_common(self.kind, self.anchor, self.correction)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return replace(self.axes().needs(), penalty="log_ratio_penalty" if self.log_ratio_penalty else None)


@dataclass(frozen=True, slots=True)
class KPOP(AnchoredRegion):
    """A symmetric mask on the larger of the two binary KLs."""

    kind: ClassVar[str] = "kpop"

    divergence: SymmetricBinaryKL = field(default_factory=SymmetricBinaryKL)
    """φ = 2.0 nats."""

    def __post_init__(self) -> None:
        checks.instance("kpop.divergence", self.divergence, (SymmetricBinaryKL,))
        check_common(self.kind, self.anchor, self.correction)

    def axes(self) -> TrustRegion:
        """This region on the shared axes."""
        return TrustRegion(self.divergence, anchor=self.anchor, direction="symmetric", correction=self.correction)


@dataclass(frozen=True, slots=True)
class TRM(AnchoredRegion):
    """Trust-region masking: drop a whole sequence when any of its tokens has gone too far. arXiv:2512.23075.

    Dropped sequences stay in the denominator.
    """

    kind: ClassVar[str] = "trm"

    statistic: Divergence | SampledK2 = field(default_factory=TopKKL)
    """Dropped if max_t D exceeds this object's bound (.05). A KL over the top K or the vocabulary; `SampledK2` where
    only the sampled token is known, said in the preset's name."""

    mean: Divergence | SampledK3 | None = field(default=None, kw_only=True)
    """If set, also dropped when mean_t D exceeds this object's bound (.001 in the paper)."""

    max_ratio: float | None = field(default=None, kw_only=True)
    """C: cap on the weight of the tokens that are kept."""

    def __post_init__(self) -> None:
        checks.instance("trm.statistic", self.statistic, (Divergence, SampledK2))
        if self.mean is not None:
            checks.instance("trm.mean", self.mean, (Divergence, SampledK3))
        for name, stat in (("statistic", self.statistic), ("mean", self.mean)):
            if stat is not None and stat.max_increase != stat.max_decrease:
                raise ConfigError(
                    f"trm.{name} must have equal bounds (there is no sign test), got {stat!r}. Give one bound."
                )
        check_common(self.kind, self.anchor, self.correction, self.max_ratio)
        self._refuse_mean()

    def _refuse_mean(self) -> None:
        by_max, by_mean = self.statistic, self.mean
        if by_mean is None:
            return
        same_unit = isinstance(by_mean, Divergence) and isinstance(by_max, Divergence) and by_mean.unit == by_max.unit
        if same_unit and by_mean.bounds[0] >= by_max.bounds[0]:
            raise ConfigError(
                f"trm.mean must have a bound below trm.statistic's, got {by_mean.bounds[0]:g} and "
                f"{by_max.bounds[0]:g}. A mean never exceeds the maximum, so it would never act; the paper's is .001."
            )
        supports = {(needs.topk, needs.full) for needs in map(self._needs_of, (by_max, by_mean))} - {(0, False)}
        if len(supports) > 1:
            raise ConfigError(
                f"trm.mean must read the same ids as trm.statistic, got {by_mean!r} and {by_max!r}. "
                "Use one k for both, or the whole vocabulary for both."
            )

    def _needs_of(self, statistic: Statistic | None) -> Needs:
        return needs_of(statistic, self.anchor, self.correction, sequences=True)

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        by_max, by_mean = self._needs_of(self.statistic), self._needs_of(self.mean)
        return replace(by_max, topk=max(by_max.topk, by_mean.topk), full=by_max.full or by_mean.full)


@dataclass(frozen=True, slots=True)
class MiniRL(Region):
    """PPO's mask on the trainer's own drift π/π', weights from the sampler: w = min(π/μ, C). arXiv:2512.01374."""

    kind: ClassVar[str] = "minirl"

    ratio: Ratio = field(default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28))
    max_ratio: float | None = field(default=None, kw_only=True)
    """C; off by default."""

    def __post_init__(self) -> None:
        checks.instance("minirl.ratio", self.ratio, (Ratio,))
        check_common(self.kind, "proximal", None, self.max_ratio)

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        return Needs(anchors=frozenset({"behavior", "proximal"}), anchor="proximal")


@dataclass(frozen=True, slots=True)
class TROLL(AnchoredRegion):
    """Project each token's distribution onto a KL ball around the anchor, differentiably. arXiv:2510.03817."""

    kind: ClassVar[str] = "troll"

    bound: float = 0.05
    """ε: the largest KL(π̂‖b), in nats."""

    alpha: float = field(default=1.0, kw_only=True)
    """α: weight of KL(π‖sg π̂), which pulls the network towards its own projection."""

    k: int = field(default=64, kw_only=True)
    """How many of the anchor's most probable ids are cells of their own (sparse form)."""

    tail_mass: float = field(default=1e-5, kw_only=True)
    """Largest anchor mass that a record with fewer than k columns may leave out. Tokens with more left out are dropped
    and counted as `fault_narrow`. Not used with k columns or more."""

    anchor: Anchor = field(default="proximal", kw_only=True)
    """π' in the paper; `behavior` projects around what actually sampled."""

    support: Literal["topk", "full"] = field(default="topk", kw_only=True)
    """`topk`: cells are the recorded ids, the sampled token and one bucket for the rest. `full`: the vocabulary."""

    rest: Literal["bucket", "fill"] = field(default="bucket", kw_only=True)
    """Treatment of unrecorded ids: one bucket that carries gradient, or, for comparison, an anchor probability of 1e-12
    at the policy's own top ids and nothing elsewhere. Neither is the paper's sparse selection."""

    def __post_init__(self) -> None:
        checks.real("troll.bound", self.bound, rule="nats in (0, 1e3]", low=0.0, high=1e3)
        checks.non_negative("troll.alpha", self.alpha)
        checks.non_negative("troll.tail_mass", self.tail_mass)
        if self.tail_mass >= 1:
            raise ConfigError(f"troll.tail_mass must be a mass below 1, got {self.tail_mass!r}. The paper's is 1e-5.")
        checks.whole("troll.k", self.k, low=1)
        checks.one_of("troll.support", self.support, ("topk", "full"))
        checks.one_of("troll.rest", self.rest, ("bucket", "fill"))
        if self.support == "full" and self.rest == "fill":
            raise ConfigError("troll.rest must be 'bucket' with support='full': nothing is unrecorded there.")
        check_common(self.kind, self.anchor, self.correction)

    def needs(self) -> Needs:
        """What the records must carry for this region."""
        sparse = self.support == "topk"
        return Needs(
            anchors=frozenset({self.anchor}) if self.correction is None else frozenset({"behavior", "proximal"}),
            topk=self.k if sparse else 0,
            anchor=self.anchor,
            tail_mass=self.tail_mass if sparse else 0.0,
            projects=True,
            own_topk="none" if not sparse else "fill" if self.rest == "fill" else "known",
            full=not sparse,
            sequences=isinstance(self.correction, MIS) and self.correction.level == "sequence",
            penalty="alpha" if self.alpha else None,
        )


REGIONS: tuple[type[Region], ...] = (
    TrustRegion, DPPO, TROLL, PPO, GSPO, CISPO, SAPO, SPO, DRPO, CPPO, IPO, KPOP, TRM, MiniRL, PolicyGradient,
)  # fmt: skip
