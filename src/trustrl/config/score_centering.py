"""Settings of score centering."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import AnchoredRegion, Needs, check_common, differentiated, needs_of
from trustrl.config.terms import TIS, IcePop
from trustrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScoreCentering(AnchoredRegion):
    """Score centering: subtracts the score that the sampler expects from each token's score. arXiv:2609.20807.

    The gradient is A·(w(a)·∇log π(a) − E_b[w·∇log π]). It masks nothing and bounds nothing.
    """

    kind: ClassVar[str] = "score-centering"

    k: int = field(default=128, kw_only=True)
    """Number of the anchor's most probable ids with a cell each. All others are one cell."""

    tail_mass: float = field(default=1e-5, kw_only=True)
    """Largest anchor mass that a record with fewer than k columns may leave out. Tokens that leave out more are dropped
    and counted as `fault_narrow`. Not used with k columns or more."""

    weight: TIS | IcePop | None = field(default=None, kw_only=True)
    """f in w = f(π/b): `TIS` is min(r, C), `IcePop` is r inside its band and 0 outside. None is w = 1."""

    support: Literal["topk", "full"] = field(default="topk", kw_only=True)
    """`topk`: cells are the recorded ids and one for the rest. `full`: the vocabulary."""

    def __post_init__(self) -> None:
        validators.whole("score-centering.k", self.k, low=1)
        validators.non_negative("score-centering.tail_mass", self.tail_mass)
        if self.tail_mass >= 1:
            raise ConfigError(f"score-centering.tail_mass must be a mass below 1, got {self.tail_mass!r}. Use 1e-5.")
        if self.weight is not None:
            validators.instance("score-centering.weight", self.weight, (TIS, IcePop))
            if isinstance(self.weight, TIS) and self.weight.level != "token":
                raise ConfigError(
                    f"score-centering.weight must have level='token', got {self.weight.level!r}. The expectation runs "
                    "over single tokens."
                )
        validators.one_of("score-centering.support", self.support, ("topk", "full"))
        check_common(self)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        found = needs_of(None, self.anchor, self.correction)
        return differentiated(found, k=self.k, tail_mass=self.tail_mass, full=self.support == "full")
