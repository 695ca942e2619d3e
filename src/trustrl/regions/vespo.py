r"""VESPO: a smooth weight on the sequence's whole ratio, which masks nothing.

    φ(w) = w^k exp(λ(1 − w)),   w = Π_t r_t,   r = π/b,   k and λ by the sign of A,   ℓ = −sg(φ) A log π

φ(1) = 1, φ is largest at w = k/λ, and it goes to 0 where w is small or large. With the defaults a sequence that is
pushed up loses weight once it has risen (φ(2) = 0.20), and one that is pushed down once it has fallen (φ(0.5) = 0.34).
Computed in logs: w may overflow where φ is 0.

Limits:

- A sequence must be whole in its call. The ratio has no length normalization: a shift of 0.01 nats per token is w = e^5
  over 500 tokens. Near 0, `trustrl/weight_mean` shows that most sequences no longer count.
- Any reduction is allowed; the authors and TRL use the mean over tokens, `trustrl.TokenMean`.
- Each token's own A selects k and λ, and A = 0 those of A ≥ 0. There is no `correction`.

In other libraries:

- Gradients agree with TRL 1.16 to 1e-6. The authors clamp each log-ratio and log w to ±20, TRL clamps log w. Here
  nothing is clamped; inside these clamps φ differs only below 1e-12.
- TRL multiplies π/π' by a truncated or masked π'/μ. With its `token_mask` one masked token removes its whole sequence.
- unsloth 2026.10.9 calls TRL's function. verl 0.9.1 has none; the authors' recipe adds it.

Reference: VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training,
arXiv:2602.10693. We read the abstract and the authors' code, which sets the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs, StalenessRegion
from trustrl.config.statistics import ANCHORS, Anchor
from trustrl.regions import ops
from trustrl.regions.base import check_staleness, needs_of
from trustrl.regions.words import anchor_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class VESPO(StalenessRegion):
    """VESPO: a smooth weight on the sequence's whole ratio, φ(w) = w^k e^(λ(1 − w)), w = Π r. arXiv:2602.10693."""

    kind: ClassVar[str] = "vespo"

    power_positive: float = 2.0
    """k for A ≥ 0, as in the authors' scripts."""

    decay_positive: float = 3.0
    """λ for A ≥ 0."""

    power_negative: float = 3.0
    """k for A < 0."""

    decay_negative: float = 2.0
    """λ for A < 0."""

    anchor: Anchor = field(default="behavior", kw_only=True)
    """b in r = π/b. With `behavior`, w contains the mismatch between trainer and sampler."""

    def __post_init__(self) -> None:
        for name in ("power_positive", "decay_positive", "power_negative", "decay_negative"):
            validators.real(f"vespo.{name}", getattr(self, name), rule="a finite number > 0", low=0.0, high=1e6)
        validators.one_of("vespo.anchor", self.anchor, ANCHORS)
        check_staleness(self)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Weights every token by a smooth function of the product of its sequence's ratios."""
        log_w = ops.sequence_total(tokens, tokens.log_ratio)
        rises = tokens.advantage >= 0
        power = ops.either(rises, self.power_positive, self.power_negative, like=log_w)
        decay = ops.either(rises, self.decay_positive, self.decay_negative, like=log_w)
        excess = log_w.clamp(max=ops.largest_exponent(log_w.dtype)).expm1()
        return ops.masked(tokens, log_weight=power * log_w - decay * excess)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return needs_of(None, self.anchor, None, sequences=True)

    def words(self) -> str:
        """Describes what the region does to a token."""
        return (
            f"Masks nothing; a smooth function of w, the product of π/{anchor_of(self)} over the response, weighs all "
            "its tokens alike. It is 1 at w = 1 and goes to 0 where w is small or large."
        )


def vespo_loss(logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor) -> Tensor:
    r"""Returns VESPO's loss: M = 1, w = φ(product of r over the sequence); rows are sequences.

    Reference: VESPO, arXiv:2602.10693.
    """
    return ops.loss(VESPO(), logp, anchor_logp, advantage, in_loss)
