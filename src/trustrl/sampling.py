"""What a sampler did to the distribution before it drew, and how the trainer's side is brought to the same one.

A ratio of log-probs means something only if both sides speak of the same distribution. Top-p .8 renormalised on one
side only puts half the tokens outside [.9, 1.1] before any training has happened.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config import checks
from trustrl.errors import IncompatibleSamplingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a set of log-probs was made. Engines fill it in; `policy_loss` compares the two sides."""

    logprobs: Literal["raw", "processed"]
    """`raw`: before temperature and truncation; `processed`: after, as sampled from."""

    temperature: float = 1.0
    """The temperature tokens were drawn at (or, on the policy's side, logits were divided by)."""

    truncated: bool = False
    """True when top-p, top-k or min-p removed tokens before drawing."""

    kept_known: bool = False
    """True when the kept ids were recorded and (on the policy's side) log-probs renormalised over them."""

    engine: str = ""
    """Name and version of the engine, for messages."""

    def __post_init__(self) -> None:
        checks.one_of("Sampling.logprobs", self.logprobs, ("raw", "processed"))
        checks.real("Sampling.temperature", self.temperature, rule="a finite number > 0", low=0.0, high=1e6)

    def must_match(self, policy: "Sampling") -> None:
        """Refuses a policy side whose log-probs are not of the distribution these tokens were drawn from.

        Raises:
            IncompatibleSamplingError: with the setting to change.
        """
        who = f" ({self.engine})" if self.engine else ""
        if self.logprobs == "raw" and (self.temperature != 1.0 or self.truncated):
            raise IncompatibleSamplingError(
                f"Rollout log-probs{who} must be 'processed', got 'raw' with temperature {self.temperature:g} and "
                f"truncated={self.truncated}: raw ones are not the distribution that was sampled. "
                "Ask the engine for processed log-probs (vLLM: logprobs_mode='processed_logprobs')."
            )
        if policy.logprobs == "raw" and (policy.temperature != 1.0 or policy.truncated):
            raise IncompatibleSamplingError(
                f"Policy log-probs must be 'processed', got 'raw' with temperature {policy.temperature:g} and "
                f"truncated={policy.truncated}. Divide the logits by the temperature before the softmax."
            )
        if self.temperature != policy.temperature:
            raise IncompatibleSamplingError(
                f"Both sides must use one temperature, got {self.temperature:g} in the rollout{who} and "
                f"{policy.temperature:g} in the policy. Divide the policy's logits by {self.temperature:g}."
            )
        if self.truncated and not (self.kept_known and policy.kept_known):
            raise IncompatibleSamplingError(
                f"The rollout{who} was sampled with a truncated vocabulary (top-p, top-k or min-p), so both sides must "
                "be renormalised over the kept ids. Record them and use trustrl.within_kept, or sample untruncated."
            )


def within_kept(
    logp: Float[Tensor, "*batch"],
    kept_logp: Float[Tensor, "*batch kept"],
    kept: Bool[Tensor, "*batch kept"],
) -> Float[Tensor, "*batch"]:
    r"""log-probs renormalised over the ids a truncated sampler kept, gradient through both terms.

        log π(a) − log Σ_{j kept} π(j)

    Args:
        logp: log π of the sampled token (or of any id that was kept), after temperature.
        kept_logp: log π at the kept ids.
        kept: False on columns that pad a shorter kept set.

    Examples:
        >>> half = torch.log(torch.tensor([0.5, 0.25, 0.25]))
        >>> within_kept(half[0], half[:2], torch.tensor([True, True])).exp()
        tensor(0.6667)
    """
    return logp - torch.logsumexp(kept_logp.masked_fill(~kept, -torch.inf), dim=-1)
