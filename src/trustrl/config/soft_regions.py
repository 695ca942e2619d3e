"""Settings of the regions without an edge: SAPO, SPO and DRPO."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

from trustrl.config import validators
from trustrl.config.axes import AnchoredRegion, Needs, TrustRegion, check_common, needs_of
from trustrl.config.statistics import (
    Ratio,
)
from trustrl.errors import TrustRLWarning


@dataclass(frozen=True, slots=True)
class SAPO(AnchoredRegion):
    """Soft adaptive policy optimization: a sigmoid gate on the ratio instead of an edge. arXiv:2511.20347."""

    kind: ClassVar[str] = "sapo"

    temperature_positive: float = 1.0
    """τ for A > 0."""

    temperature_negative: float = 1.05
    """τ for A ≤ 0: slightly sharper, as published."""

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            validators.real(f"sapo.{name}", getattr(self, name), rule="a finite number > 0", low=0.0, high=1e6)
        check_common(self)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)


@dataclass(frozen=True, slots=True)
class SPO(AnchoredRegion):
    """Simple policy optimization: a quadratic penalty on r − 1. arXiv:2401.16025."""

    kind: ClassVar[str] = "spo"

    width: float = 0.2
    """ε: the objective has its maximum at |r − 1| = ε. The default is our choice."""

    def __post_init__(self) -> None:
        validators.real("spo.width", self.width, rule="a distance of the ratio from 1, > 0", low=0.0, high=1e6)
        check_common(self)

    def axes(self) -> TrustRegion:
        """Returns this region on the shared axes."""
        return TrustRegion(
            Ratio(max_increase=self.width), anchor=self.anchor, action="penalise", correction=self.correction
        )


@dataclass(frozen=True, slots=True)
class DRPO(AnchoredRegion):
    """DRPO: a quadratic penalty on the probability gap π − b. arXiv:2606.09821."""

    kind: ClassVar[str] = "drpo"

    width: float = 0.2
    """δ: the objective has its maximum at |π − b| = δ. Our choice; the published 12.5 has little effect."""

    def __post_init__(self) -> None:
        validators.real("drpo.width", self.width, rule="a probability gap > 0", low=0.0, high=1e6)
        check_common(self)
        if self.width > 1:
            warnings.warn(
                f"drpo.width = {self.width:g}: a probability gap never exceeds 1, so the factor on the gradient stays "
                f"in [{1 - 1 / self.width:.2f}, {1 + 1 / self.width:.2f}] and has little effect. "
                "Use a width below 1; the default is 0.2.",
                TrustRLWarning,
                stacklevel=3,
            )

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)
