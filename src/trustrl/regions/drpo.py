r"""DRPO: SPO's quadratic penalty on the probability gap π − b.

    objective = r A − |A| (r − 1)(π − b) / (2δ),   r = π/b
    M = 1,   w = r [1 − sign(A)(π − b) / δ],   ∂objective/∂log π = w A

The objective has its maximum where π − b = sign(A) δ. Past it the token is pulled back. A rare token may have a large
ratio: its gap is small, and the penalty hardly acts on it. Compare `trustrl/gap_p99` with δ.

Limits:

- The bracket lies in [1 − 1/δ, 1 + 1/δ]. The ratio before it has no cap, and there is no setting for one.
- `TrustRegion(BinaryTV(...), action="penalize")` is the same rule for widths up to 1, with one width per side.

In other libraries:

- The published code states δ = 12.5. A probability gap never exceeds 1, so the bracket stays in [0.92, 1.08] and holds
  nothing back. A width above 1 warns here.

Reference: Rethinking the Divergence Regularization in LLM RL, arXiv:2606.09821.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.errors import TrustRLWarning
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.spo import penalized
from trustrl.regions.words import anchor_of, number

if TYPE_CHECKING:
    from torch import Tensor


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

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Applies the quadratic penalty on π − b."""
        return penalized(tokens, ops.probability_gap(tokens), self.width)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, self.correction)

    def words(self) -> str:
        """Describes what the region does to a token."""
        gap = f"|π − {anchor_of(self)}|"
        return f"Masks nothing; reverses the gradient once {gap} exceeds {number(self.width)} (probability)."


def drpo_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, width: float = 0.2) -> Tensor:
    r"""Returns DRPO's loss, ℓ = −(r A − |A| (r − 1)(π − b) / (2·width)).

    Reference: arXiv:2606.09821.
    """
    return ops.loss(DRPO(width=width), logp, anchor_logp, advantage, in_loss)
