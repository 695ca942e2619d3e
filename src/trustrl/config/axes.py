"""Base classes of regions, the data that a region needs, and the prefix level of the shared axes."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeGuard

from trustrl.config import validators
from trustrl.config.statistics import Anchor
from trustrl.errors import ConfigError, UnknownNameError


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
    """Base class of regions. A subclass is a frozen dataclass with a `kind` and a `decide`.

    A region that is a point on the shared axes needs only `axes`: its needs, decision and words follow.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def axes(self) -> Any:
        """Returns this region as a `TrustRegion`, or None if it has rules that the shared axes do not cover."""
        return None

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        axes = self.axes()
        return Needs() if axes is None else axes.needs()

    def decide(self, tokens: Any) -> Any:
        """Returns the `Decision` for each of the `CleanTokens`.

        `trustrl.policy_loss` applies the rules that hold for all regions afterwards: the mismatch correction, stale
        tokens, and tokens with A = 0.

        Raises:
            UnknownNameError: If the class has neither `decide` nor `axes`, and no function was registered for it.
        """
        axes = self.axes()
        if axes is None:
            raise UnknownNameError(
                f"Unknown region {self.kind!r}. Give {type(self).__name__} a method decide(tokens), or axes(), or "
                "register a function with trustrl.regions.register_region."
            )
        return axes.decide(tokens)

    def words(self) -> str:
        """Describes what the region does to a token. If the text is empty, reports list the settings."""
        axes = self.axes()
        return "" if axes is None else axes.words()


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
    """Smallest rate with `"p90"`."""

    rate_high: float = 0.04
    """Largest rate with `"p90"`."""

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
