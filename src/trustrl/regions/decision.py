"""What every region returns."""

from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.divergences.interval import Interval


@dataclass(frozen=True, slots=True)
class Decision:
    r"""One verdict per token. The loss it stands for is

        ℓ_t = −sg(M_t · w_t) · A_t · log π̃(a_t) + penalty_t,   gradient −M w A ∇log π̃

    with π̃ the policy itself, or its projection.
    """

    keep: Bool[Tensor, "*batch"]
    """M: False stops the token's gradient."""

    weight: Float[Tensor, "*batch"]
    """w, detached. Negative only where an objective is bent back past its top."""

    logp: Float[Tensor, "*batch"]
    """log π̃ of the sampled token, with gradient."""

    value: Float[Tensor, "*batch"] | None = None
    """The objective's value, detached, where the region maximises one: the loss then reads −value and keeps the
    gradient above. None leaves the value at −M w A log π̃, which means nothing: watch the metrics."""

    penalty: Float[Tensor, "*batch"] | None = None
    """A term of the region's own, with gradient, added to the loss of every usable token."""

    divergence: Interval | None = None
    """What the verdict rested on, per token."""

    max_increase: float | None = None
    """The bounds it was held against, for the undecided share; None where there is no edge."""

    max_decrease: float | None = None

    side: Float[Tensor, "*batch"] | None = None
    """The log-ratio whose sign chose the bound, where it is not the token's own (a sequence's mean)."""

    extra: dict[str, Tensor] = field(default_factory=dict)
    """Per-token numbers only this region has, by metric name."""
