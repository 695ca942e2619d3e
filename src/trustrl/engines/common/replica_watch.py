"""Check at every step that each replica of the sampler follows the trainer. Costs no forward pass.

The first update of a rollout has both log-probs at the same weights: the policy's own, and the one that the sampler
recorded. Two numbers per replica, 16 bytes, join the sums that ranks add up in every step. `replica_gaps` has the rule.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trustrl.config.validators import one_of
from trustrl.core.diagnostics import Sums
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.sum_table import LARGEST_LOG_RATIO
from trustrl.engines.common.replica_gaps import ReplicaGaps, StaleReplica
from trustrl.errors import EngineError, TrustRLWarning

OnStaleReplica = Literal["warn", "raise", "ignore"]
"""Response to a replica that does not follow the trainer."""

TOKENS, GAP = "replica/tokens", "replica/gap"
"""Sums of a step by replica: the tokens compared, and their |log π' − log μ|."""

STALE, LARGEST = "trustrl/stale_replicas", "trustrl/replica_gap_max"
"""Metrics: the number of replicas that stand out, and the largest mean gap of a replica in nats."""

UNKNOWN = -1
"""The number of a sequence whose replica is unknown, or that several replicas sampled."""


class ReplicaWatch:
    """The replicas of a run, their gaps so far, and the check of each step.

    Args:
        on_stale: The response to a replica that stands out.
        setting: The engine's name of that setting.
        warns: Whether this rank warns. Every rank raises.
        names: The replicas that every rank knows from the start.
    """

    def __init__(
        self, on_stale: OnStaleReplica, *, setting: str = "on_stale_replica", warns: bool, names: Sequence[str] = ()
    ) -> None:
        one_of(setting, on_stale, ("warn", "raise", "ignore"))
        self.names = list(names)
        self._on_stale: OnStaleReplica = on_stale
        self._setting, self._warns = setting, warns
        self._gaps = ReplicaGaps()
        self._named: frozenset[str] = frozenset()

    def knows(self, names: Sequence[str | None]) -> bool:
        """Returns whether all of these replicas have a number."""
        return {name for name in names if name is not None} <= {*self.names}

    def agree(self, names: Sequence[str | None], group: Any = None) -> None:
        """Numbers new replicas alike on all ranks of a group, each of which must call it."""
        new = sorted({name for name in names if name is not None} - {*self.names})
        gathered: list[Any] = [new]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1:
            gathered = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(gathered, new, group=group)
        self.names += sorted({name for part in gathered for name in part})

    def numbers(self, names: Sequence[str | None]) -> Tensor:
        """Returns the number of each sequence's replica, for `RolloutTokens.replica`."""
        known = {name: number for number, name in enumerate(self.names)}
        return torch.tensor([UNKNOWN if name is None else known[name] for name in names], dtype=torch.int64)

    def sums(self, policy: PolicyTokens, rollout: RolloutTokens) -> Sums:
        """Returns the sums of one micro-batch of a rollout's first update; none if no replica or no μ is known."""
        logp, replica = rollout.behavior_logp, rollout.replica
        if not self.names or logp is None or replica is None:
            return Sums({}, {})
        gap = (policy.logp.detach().double() - logp.double()).abs()
        compared = rollout.in_loss & gap.isfinite()
        if rollout.version is not None and policy.version is not None:
            compared = compared & (rollout.version == policy.version)
        number = replica if replica.ndim == compared.ndim else replica.unsqueeze(-1).expand(compared.shape)
        compared = compared & (number != UNKNOWN)
        # Tokens that are not compared fall into one more bin, so that nothing waits for the device.
        place = torch.where(compared, number, len(self.names)).reshape(-1)
        values = torch.where(compared, gap.clamp(max=LARGEST_LOG_RATIO), 0.0).reshape(-1)
        empty = values.new_zeros(len(self.names) + 1)
        counts = empty.scatter_add(0, place, torch.ones_like(values))
        return Sums({TOKENS: counts[:-1], GAP: empty.scatter_add(0, place, values)[:-1]}, {})

    def check(self, total: Sums, step: int) -> dict[str, float]:
        """Checks one step, and returns its metrics: none if it compared nothing.

        Args:
            total: The sums of the step over all ranks, on the host.
            step: The training step.

        Raises:
            EngineError: If a replica stands out, and the setting asks for it.
        """
        if TOKENS not in total.added:
            return {}
        counts, sums = (total.added[name].tolist() for name in (TOKENS, GAP))
        gaps = {
            name: (gap / count, int(count))
            for name, count, gap in zip(self.names, counts, sums, strict=True)
            if count > 0
        }
        if not gaps:
            return {}
        stale = self._gaps.stale(gaps)
        names = frozenset(replica.name for replica in stale)
        if names - self._named and self._on_stale != "ignore":
            self._report(stale, step)
        self._named = names
        return {STALE: float(len(stale)), LARGEST: max(gap for gap, _ in gaps.values())}

    def _report(self, stale: list[StaleReplica], step: int) -> None:
        sentences = " ".join(
            f"Replica {replica.name} stands out at step {step}: its mean |log π' − log μ| is {replica.gap:.3g} nats at "
            f"{replica.tokens:,} tokens, where {replica.against} suggest {replica.usual:.3g}."
            for replica in stale
        )
        advice = "The trainer's weights probably did not reach it. Restart it, or send the weights again."
        if self._on_stale == "raise":
            raise EngineError(f"{sentences} {advice} Set {self._setting}='warn' to train on.")
        if self._warns:
            message = (
                f"{sentences} {advice} Set {self._setting}='raise' to stop the run. Later steps do not repeat this."
            )
            warnings.warn(message, TrustRLWarning, stacklevel=3)
