"""Sampling settings behind recorded log-probs, and renormalization of the policy's log-probs to match them.

A ratio of log-probs is meaningful only if both sides describe the same distribution. Top-p 0.8 renormalized on one side
only puts half the tokens outside [0.9, 1.1] before any training happens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config import validators
from trustrl.config.sampling_parameters import describes_the_draw
from trustrl.errors import IncompatibleSamplingError

PADDING = torch.iinfo(torch.int64).max
"""The key of columns that pad a kept set. It sorts after every id."""


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
        """Raises if the policy's log-probs do not describe the distribution that these tokens were sampled from."""
        who = f" ({self.engine})" if self.engine else ""
        if not describes_the_draw(self.logprobs, temperature=self.temperature, truncated=self.truncated):
            raise IncompatibleSamplingError(
                f"Rollout log-probs{who} must be 'processed', got 'raw' with temperature {self.temperature:g} and "
                f"truncated={self.truncated}. Raw log-probs do not describe the distribution that was sampled. "
                "Configure the engine to return processed log-probs (vLLM: logprobs_mode='processed_logprobs')."
            )
        if not describes_the_draw(policy.logprobs, temperature=policy.temperature, truncated=policy.truncated):
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
                "trustrl.core.sampling.KeptSet, or sample without truncation."
            )


def within_kept(
    logp: Float[Tensor, "*batch"],
    kept_logp: Float[Tensor, "*batch kept"],
    kept: Bool[Tensor, "*batch kept"],
) -> Float[Tensor, "*batch"]:
    r"""Returns log-probs renormalized over the ids that a truncated sampler kept.

        log π(a) − log Σ_{j kept} π(j)

    The gradient flows through both terms. Where no id is marked as kept, nothing was removed, and the log-prob is
    returned unchanged.

    Args:
        logp: log π of the sampled token (or of any kept id), after temperature.
        kept_logp: log π at the kept ids.
        kept: False on columns that pad a shorter kept set.

    Examples:
        >>> half = torch.log(torch.tensor([0.5, 0.25, 0.25]))
        >>> within_kept(half[0], half[:2], torch.tensor([True, True])).exp()
        tensor(0.6667)
    """
    return logp - _log_mass(kept_logp, kept, empty=0.0)


class KeptSet:
    """The policy inside the ids that a truncated sampler kept, renormalized over them.

    Costs one sort of the ids, and per lookup one binary search for each id.

    Args:
        ids: The kept ids in any order; below 0 for padding.
        logp: log π at these ids, after temperature, with gradient.

    Examples:
        >>> kept = KeptSet(torch.tensor([[4, 9, 2]]), torch.log(torch.tensor([[0.4, 0.2, 0.2]])))
        >>> kept.at(torch.tensor([[9, 5]])).exp()
        tensor([[0.2500, 0.0000]])
    """

    def __init__(self, ids: Int[Tensor, "*batch kept"], logp: Float[Tensor, "*batch kept"]) -> None:
        keys, order = torch.where(ids < 0, PADDING, ids.long()).sort(dim=-1)
        self._keys, self._logp = keys, logp.gather(-1, order)
        self._kept = keys != PADDING
        self._log_mass = _log_mass(self._logp, self._kept, empty=0.0)

    @property
    def known(self) -> Bool[Tensor, "*batch"]:
        """True where at least one id was kept."""
        return self._kept.any(-1)

    def within(self, logp: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Returns renormalized log-probs of kept ids. See `within_kept`."""
        return logp - self._log_mass

    def at(self, ids: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """Returns the renormalized log-probs of any ids; −inf for ids that were removed."""
        place, present = self._find(ids)
        return torch.where(present, self._logp.gather(-1, place) - self._log_mass.unsqueeze(-1), -torch.inf)

    def outside(self, ids: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
        """Returns the log of the renormalized mass of all kept ids that are not in `ids`; −inf if there are none."""
        place, present = self._find(ids)
        listed = torch.zeros_like(self._keys).scatter_add_(-1, place, present.long()) > 0
        return _log_mass(self._logp, self._kept & ~listed, empty=-torch.inf) - self._log_mass

    def top(self, k: int) -> tuple[Int[Tensor, "*batch k"], Float[Tensor, "*batch k"]]:
        """Returns the k most probable kept ids and their renormalized log-probs; −1 and −inf if fewer were kept."""
        known = self._logp.detach().masked_fill(~self._kept, -torch.inf)
        place = known.topk(min(k, known.shape[-1]), dim=-1).indices
        ids = self._keys.gather(-1, place).masked_fill(~self._kept.gather(-1, place), -1)
        ids = torch.nn.functional.pad(ids, (0, k - place.shape[-1]), value=-1)
        return ids, self.at(ids)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the column of each id, and whether it is there."""
        wanted = ids.long().contiguous()
        place = torch.searchsorted(self._keys, wanted).clamp(max=self._keys.shape[-1] - 1)
        return place, (self._keys.gather(-1, place) == wanted) & (wanted >= 0)


def _log_mass(logp: Tensor, counted: Tensor, *, empty: float) -> Tensor:
    """Returns the log-sum-exp of the counted columns, or `empty` without gradient where none is counted."""
    some = counted.any(-1)
    # A log-sum-exp of nothing has a NaN gradient, so such rows sum over all columns first.
    mass = torch.logsumexp(torch.where(counted | ~some.unsqueeze(-1), torch.where(counted, logp, 0.0), -torch.inf), -1)
    return torch.where(some, mass, empty)
