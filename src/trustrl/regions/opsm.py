r"""OPSM: drops a sequence with A < 0 that became less likely, and masks single tokens of the others.

    M = 0 for the whole sequence  iff  A < 0 and mean_t log(μ/π) > δ                                     (eq. 9)
    M_t = 0 for a token that is `leaving` by its statistic, PPO's |r − 1| by default,   w = r,   r = π/b

The mean estimates KL(μ‖π) per token and is negative if the tokens rose, so only losing sequences that fell are dropped:
those whose geometric-mean ratio is below e^−δ.

Limits:

- A sequence must be whole in its call. `anchor="proximal"` masks single tokens by π/π', needs both log-probs, and still
  takes the drift from μ.
- Published values of δ are three orders of magnitude apart: 1e-4 in slime and miles, 0.1 in a public script, 0.5 in
  TRL's example. The first is for a drift from π', which is 0 before the first update; from μ it contains the sampler's
  rounding. Read `trustrl/kl_k1` at the first update before you lower δ.
- `trustrl/sequence_dropped_share` counts tokens of dropped sequences, `trustrl/masked_share` both masks together.

In other libraries:

- Gradients agree with TRL 1.16 to 1e-6 with `anchor="proximal"`. TRL sets a drift of NaN to 0, and takes the sign of
  the sequence's A. Here each token's own A decides.
- slime and miles take the drift from π', or from μ with `--use-rollout-logprobs`.
- In ms-swift 4.6 dropped sequences leave the denominator, and their KL is lost. Here they stay and keep their
  penalties, as in the paper.
- open-instruct's sequence mask, described as DeepSeek-V3.2 style, has two sides and no sign test, on π'/μ. The nearest
  here is `MIS` with `level="sequence-mean"`.

Reference: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, arXiv:2512.02556, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from trustrl.config import validators
from trustrl.config.axes import Needs
from trustrl.config.statistics import Ratio, Statistic
from trustrl.regions import ops
from trustrl.regions.base import AnchoredRegion, check_common, needs_of
from trustrl.regions.dppo import leaving
from trustrl.regions.trust_region import TrustRegion
from trustrl.regions.words import anchor_of, beyond, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OPSM(AnchoredRegion):
    """Off-policy sequence masking: drops a sequence with A < 0 that became less likely. arXiv:2512.02556, eq. 9.

    Sequences that are kept may have single tokens masked by a statistic: PPO's ratio by default.
    """

    kind: ClassVar[str] = "opsm"

    max_drift: float = 0.5
    """δ: the largest mean over the response of log μ − log π, in nats per token. The paper has no value; 0.5 is TRL's
    example."""

    statistic: Statistic | None = field(
        default_factory=lambda: Ratio(max_decrease=0.2, max_increase=0.28), kw_only=True
    )
    """Statistic that masks single tokens of kept sequences, measured from `anchor`, with the bounds of `ppo`. None
    masks none. Any other of a token is possible, such as `BinaryTV()`."""

    def __post_init__(self) -> None:
        validators.real("opsm.max_drift", self.max_drift, rule="nats per token, > 0", low=0.0)
        check_common(self)
        if self.statistic is not None:
            validators.instance("opsm.statistic", self.statistic, (Statistic,))
            TrustRegion(self.statistic, anchor=self.anchor, correction=self.correction)

    def decide(self, tokens: ops.Tokens) -> ops.Decision:
        """Drops sequences by their mean drift from μ, and masks single tokens by the statistic."""
        log_ratio = tokens.log_ratio
        from_behavior = log_ratio
        if self.anchor == "proximal":
            assert tokens.log_mismatch is not None  # the region's needs include both anchors
            from_behavior = log_ratio + tokens.log_mismatch
        drift = -ops.sequence_mean(tokens, from_behavior)
        dropped = (tokens.advantage < 0) & (drift > self.max_drift)
        by, mask = None, dropped
        if self.statistic is not None:
            by = ops.measured(tokens, self.statistic)
            mask = dropped | leaving(by.distance, log_ratio, tokens.advantage, **by.bounds)
        decision = ops.masked(tokens, mask, by)
        return replace(decision, extra={"sequence_dropped": dropped})

    def needs(self) -> Needs:
        """Returns the data that the records must carry for this region."""
        needs = needs_of(self.statistic, self.anchor, self.correction, sequences=True)
        return replace(needs, anchors=needs.anchors | {"behavior"})

    def words(self) -> str:
        """Describes what the region does to a token."""
        drop = (
            f"Drops a response with a negative advantage once its mean log μ/π exceeds {number(self.max_drift)} nats."
        )
        if self.statistic is None:
            return drop
        too_far = beyond(self.statistic, anchor_of(self))
        return f"{drop} Masks a token of the others once {too_far} and the update pushes it further out."


def opsm_loss(
    logp: Tensor, behavior_logp: Tensor, advantage: Tensor, in_loss: Tensor, *, max_drift: float = 0.5
) -> Tensor:
    r"""Returns PPO's loss without the sequences that have A < 0 and a mean log(μ/π) > max_drift; rows are sequences.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    return ops.loss(OPSM(max_drift), logp, behavior_logp, advantage, in_loss)
