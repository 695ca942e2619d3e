r"""PPO: the clip, as a mask on |r − 1| with the same gradient as min/clip.

    ℓ = −min(r A, clip(r, 1 − ε⁻, 1 + ε⁺) A),   r = π/b                                                  (eq. 7)
    ∂ℓ/∂log π = −M r A,   M = 0 iff the token is `leaving` by D = |r − 1|

PPO therefore shares its mask with DPPO and differs in the statistic alone. Relaxed, M = 1 where b < α on the relaxed
side: A > 0, A < 0, or both.

Reference: Proximal Policy Optimization Algorithms, arXiv:1707.06347. Dual clip: Mastering Complex Control in MOBA
Games, arXiv:1912.09729, eq. 5. Relaxed clip: arXiv:2602.04879, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import Ratio
from trustrl.errors import ConfigError
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common
from trustrl.regions.dppo import leaving
from trustrl.regions.trust_region import TrustRegion
from trustrl.regions.words import anchor_of, number

if TYPE_CHECKING:
    from torch import Tensor


def clipped_objective(
    log_ratio: Tensor, advantage: Tensor, *, max_increase: float | Tensor, max_decrease: float | Tensor
) -> Tensor:
    """Returns PPO's textbook value, min(r·A, clip(r, 1 − max_decrease, 1 + max_increase)·A)."""
    ratio = log_ratio.exp()
    bounds: tuple[Any, Any] = 1 - max_decrease, 1 + max_increase  # torch types them as two numbers or two tensors
    return (ratio * advantage).minimum(ratio.clamp(*bounds) * advantage)


def runaway(log_ratio: Tensor, advantage: Tensor, *, max_ratio: float) -> Tensor:
    """Flags tokens that dual clip masks: A < 0 and r > c."""
    return (advantage < 0) & (log_ratio.exp() > max_ratio)


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

    relax_side: Literal["both", "increase", "decrease"] = field(default="both", kw_only=True)
    """Side of the clip that `relax_below` removes: `increase` (A > 0) is the paper's relax-high, `decrease` (A < 0) its
    relax-low."""

    def __post_init__(self) -> None:
        validators.instance("ppo.ratio", self.ratio, (Ratio,))
        validators.one_of("ppo.action", self.action, ("mask", "clip"))
        check_common(self, self.max_ratio)
        self._clip()
        if self.dual_clip is not None:
            validators.real("ppo.dual_clip", self.dual_clip, rule="a ratio > 1, or None", low=1.0)
        if self.relax_below is not None:
            validators.real(
                "ppo.relax_below", self.relax_below, rule="a probability in (0, 1], or None", low=0.0, high=1.0
            )
        validators.one_of("ppo.relax_side", self.relax_side, ("both", "increase", "decrease"))
        if self.relax_side != "both" and self.relax_below is None:
            raise ConfigError(
                f"ppo.relax_below must be given with relax_side={self.relax_side!r}, got None. Set α, the probability "
                "below which tokens are not clipped."
            )

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Masks tokens whose ratio leaves the clip range, or that the dual clip drops."""
        log_ratio, advantage = tokens.log_ratio, tokens.advantage
        by = ops.measured(tokens, self.ratio)
        mask = leaving(by.distance, log_ratio, advantage, **by.bounds)
        value = clipped_objective(log_ratio, advantage, **by.per_token_bounds) if self.action == "clip" else None
        if self.relax_below is not None:
            clipped = tokens.log_anchor.exp() >= self.relax_below
            if self.relax_side != "both":
                clipped = clipped | (advantage < 0 if self.relax_side == "increase" else advantage > 0)
            mask = mask & clipped
            value = None if value is None else value.where(clipped, log_ratio.exp() * advantage)
        if self.dual_clip is not None:
            dropped = runaway(log_ratio, advantage, max_ratio=self.dual_clip)
            mask = mask | dropped
            value = None if value is None else (self.dual_clip * advantage).where(dropped, value)
        return ops.masked(tokens, mask, by, max_ratio=self.max_ratio, value=value)

    def _clip(self) -> TrustRegion:
        """Returns the clip on the shared axes."""
        return TrustRegion(
            self.ratio, anchor=self.anchor, action=self.action, max_ratio=self.max_ratio, correction=self.correction
        )

    def axes(self) -> TrustRegion | None:
        """Returns this region on the shared axes; None with a dual or a relaxed clip, which they do not cover."""
        return self._clip() if self.dual_clip is None and self.relax_below is None else None

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        return self._clip().needs()

    def masks_tokens(self) -> bool:
        """Returns whether the region masks single tokens by a bound, which `when_stale="tighten"` requires."""
        return True

    def words(self) -> str:
        """Describes what the region does to a token."""
        text = self._clip().words()
        if self.dual_clip is not None:
            text += f" Tokens with a negative advantage are masked above π/μ = {number(self.dual_clip)}."
        if self.relax_below is not None:
            side = {"both": "", "increase": " upwards", "decrease": " downwards"}[self.relax_side]
            text += f" Tokens with {anchor_of(self)} below {number(self.relax_below)} are never masked{side}."
        return text


PRESETS = {
    "ppo": PPO,
    # The relaxation of DPPO's section 6, at the smallest α that it studies.
    "ppo-relaxed": lambda: PPO(relax_below=0.1),
}


def ppo_loss(
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    in_loss: Tensor,
    *,
    max_increase: float = 0.28,
    max_decrease: float = 0.2,
) -> Tensor:
    r"""Returns PPO's clipped loss, with its textbook value and gradient.

        ℓ = −min(r·A, clip(r, 1 − max_decrease, 1 + max_increase)·A)

    Reference: Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
    """
    region = PPO(Ratio(max_increase=max_increase, max_decrease=max_decrease), action="clip")
    return ops.loss(region, logp, anchor_logp, advantage, in_loss)
