r"""Score centering: subtracts the score that the sampler expects from each token's score.

    ℓ = −A·[w(a)·log π(a) − Σ_c sg(b_c w_c)·log π_c],   w = f(π/b),   gradient −A·(w(a)·s(a) − E_b[w s]),   s = ∇log π

The cells c are the K recorded ids and one for all others, whether the sampled token is among them or not: they must not
depend on it. The last cell stands for an anchor that is proportional to the policy outside the K ids, as in the paper.
For an advantage that does not depend on the token, the gradient then has the expectation 0 over cells: the drift
towards the sampler, which plain policy gradient has off-policy, is gone. Over the vocabulary the bias that is left
moves mass between ids outside the top K alone, at most 2·|A|·b_rest in total.

Limits:

- This region bounds nothing: several updates on one rollout can move the policy as far as without a region.
- The recorded top K must be the anchor's, and the trainer must pass the policy's log-probs at these ids with gradient.
  Columns beyond K join the tail.
- `anchor="proximal"` centers on π', which leaves a drift of the mismatch. `correction=TIS(max_ratio=math.inf)` removes
  it; a lower cap leaves a part.
- `weight=TIS(max_ratio=math.inf)` is `pg-is`. Masked importance sampling in the paper is `weight=IcePop(...)`.
- Twice `trustrl/anchor_tail_mean` bounds the bias of the tail. `trustrl/weight_mean` is 1, because w is part of the
  differentiated term. Cost per token: one exponential per column and side, two with a weight.

In other libraries:

- miles, vime and NeMo RL sum over the head alone, which is the same gradient, and floor the policy's tail at a constant
  such as 1e-6. Here the floor is the resolution of the record.
- NeMo RL and SkyRL's pull request add the term to a clipped or masked loss. Here it is a region by itself.

Reference: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv:2609.20807. We read its abstract and the
implementations named above, which cite its appendix A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.terms import TIS, IcePop
from trustrl.errors import ConfigError
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, differentiated, needs_of
from trustrl.regions.words import anchor_of, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoreCentering(AnchoredRegion):
    """Score centering: subtracts the score that the sampler expects from each token's score. arXiv:2609.20807.

    The gradient is A·(w(a)·∇log π(a) − E_b[w·∇log π]). It masks nothing and bounds nothing.
    """

    kind: ClassVar[str] = "score-centering"

    k: int = field(default=128, kw_only=True)
    """Number of the anchor's most probable ids with a cell each. All others are one cell. 128 is the paper's, as miles
    and vime report it."""

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

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Centers each token's score. The weight w is part of the differentiated term, because b_c w_c must be too."""
        logp = tokens.logp.to(tokens.log_policy.dtype)
        ones = ops.ones_like(tokens.log_ratio)
        own = ones if self.weight is None else ops.bounded_weight(tokens.log_ratio, self.weight)
        centered = own * logp - self._expected(tokens, logp, own)
        over = {"capped": tokens.log_ratio > math.log(self.weight.max_ratio)} if isinstance(self.weight, TIS) else {}
        return ops.Decision(ops.keep_all(tokens), ones, centered.to(tokens.logp.dtype), extra=over)

    def _expected(self, tokens: ops.Tokens, logp: Tensor, own: Tensor) -> Tensor:
        """Returns Σ_c sg(b_c w_c)·log π_c with gradient; only the gradient has a meaning. `own` is w(a)."""
        cells, usable = ops.cells(tokens), tokens.usable
        held = usable.unsqueeze(-1) & (cells.log_policy > -math.inf)
        mass = self._mass(cells.anchor, cells.log_anchor, cells.log_policy.detach()).where(held, 0.0)
        expected = (mass * cells.log_policy.where(held, 0.0)).sum(-1)
        if cells.recorded is None:
            return expected
        own_b, recorded = tokens.log_anchor.exp(), cells.recorded
        expected = expected + (own_b * own * logp).where(recorded, 0.0)
        # All other ids, the sampled token included if it is one of them.
        rest_b = (cells.anchor_tail + ops.where(recorded, 0.0, own_b)).where(usable, 0.0)
        rest_p = (cells.policy_tail + ops.where(recorded, 0.0, logp.exp())).where(usable, 1.0)
        # 1 − Σ below the rounding of its terms is noise. The floor keeps its factor b/π finite.
        floored = rest_p.detach().clamp(min=max(cells.resolution, ops.smallest(rest_p)))
        return expected + self._mass(rest_b, rest_b.log(), floored.log()) / floored * rest_p

    def _mass(self, b: Tensor, log_b: Tensor, log_p: Tensor) -> Tensor:
        """Returns b·f(π/b); 0 where the anchor has no mass."""
        if self.weight is None:
            return b
        return (b * ops.bounded_weight(log_p - log_b, self.weight)).where(b > 0, 0.0)

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        needs = needs_of(None, self.anchor, self.correction)
        return differentiated(needs, k=self.k, tail_mass=self.tail_mass, full=self.support == "full")

    def words(self) -> str:
        """Describes what the region does to a token."""
        b, weight = anchor_of(self), self.weight
        top_k = f"the {self.k} most probable tokens of {b} and a tail"
        over = "the whole vocabulary" if self.support == "full" else top_k
        text = f"Masks nothing; subtracts from ∇log π its expectation under {b} over {over}."
        if weight is None:
            return text
        top = number(weight.max_ratio)
        how = f"capped at {top}" if isinstance(weight, TIS) else f"and 0 outside [{number(weight.min_ratio)}, {top}]"
        return f"{text} Both have the weight π/{b}, {how}."
