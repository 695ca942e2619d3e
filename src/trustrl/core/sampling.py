"""Sampling settings behind recorded log-probs, and renormalization of the policy's log-probs to match them.

A ratio of log-probs is meaningful only if both sides describe the same distribution. Top-p 0.8 renormalized on one side
only puts half the tokens outside [0.9, 1.1] before any training happens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trustrl.config import validators
from trustrl.errors import IncompatibleSamplingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings behind a set of log-probs. Engines fill it in; `policy_loss` compares the two sides."""

    logprobs: Literal["raw", "processed"]
    """`raw`: before temperature and truncation. `processed`: after both, the distribution that was sampled."""

    temperature: float = 1.0
    """The sampling temperature; on the policy's side, the temperature that divides the logits."""

    truncated: bool = False
    """True if top-p, top-k or min-p removed tokens before sampling."""

    kept_known: bool = False
    """True if the kept ids were recorded and, on the policy's side, log-probs were renormalized over them."""

    engine: str = ""
    """Name and version of the engine, for error messages."""

    def __post_init__(self) -> None:
        validators.one_of("Sampling.logprobs", self.logprobs, ("raw", "processed"))
        validators.real("Sampling.temperature", self.temperature, rule="a finite number > 0", low=0.0, high=1e6)

    def must_match(self, policy: "Sampling") -> None:
        """Raises if the policy's log-probs do not describe the distribution that these tokens were sampled from.

        Raises:
            IncompatibleSamplingError: If the two sides differ. The message names the setting to change.
        """
        who = f" ({self.engine})" if self.engine else ""
        if self.logprobs == "raw" and (self.temperature != 1.0 or self.truncated):
            raise IncompatibleSamplingError(
                f"Rollout log-probs{who} must be 'processed', got 'raw' with temperature {self.temperature:g} and "
                f"truncated={self.truncated}. Raw log-probs do not describe the distribution that was sampled. "
                "Configure the engine to return processed log-probs (vLLM: logprobs_mode='processed_logprobs')."
            )
        if policy.logprobs == "raw" and (policy.temperature != 1.0 or policy.truncated):
            raise IncompatibleSamplingError(
                f"Policy log-probs must be 'processed', got 'raw' with temperature {policy.temperature:g} and "
                f"truncated={policy.truncated}. Divide the logits by the temperature before the softmax."
            )
        if self.temperature != policy.temperature:
            raise IncompatibleSamplingError(
                f"Rollout and policy must use the same temperature, got {self.temperature:g} in the rollout{who} and "
                f"{policy.temperature:g} in the policy. Divide the policy's logits by {self.temperature:g}."
            )
        if self.truncated and not (self.kept_known and policy.kept_known):
            raise IncompatibleSamplingError(
                f"The rollout{who} was sampled with a truncated vocabulary (top-p, top-k or min-p), so both sides "
                "must be renormalized over the kept ids. Record the kept ids and use "
                "trustrl.core.sampling.within_kept, or sample without truncation."
            )


def within_kept(
    logp: Float[Tensor, "*batch"],
    kept_logp: Float[Tensor, "*batch kept"],
    kept: Bool[Tensor, "*batch kept"],
) -> Float[Tensor, "*batch"]:
    r"""Returns log-probs renormalized over the ids that a truncated sampler kept.

        log π(a) − log Σ_{j kept} π(j)

    The gradient flows through both terms.

    Args:
        logp: log π of the sampled token (or of any kept id), after temperature.
        kept_logp: log π at the kept ids.
        kept: False on columns that pad a shorter kept set.

    Examples:
        >>> half = torch.log(torch.tensor([0.5, 0.25, 0.25]))
        >>> within_kept(half[0], half[:2], torch.tensor([True, True])).exp()
        tensor(0.6667)
    """
    return logp - torch.logsumexp(kept_logp.masked_fill(~kept, -torch.inf), dim=-1)
