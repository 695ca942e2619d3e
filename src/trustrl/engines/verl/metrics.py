"""The region's metrics in verl's log.

A worker of ours adds up sums over a training step's micro-batches, updates and ranks, and reports their rates. Where
verl calls the loss without one, it averages one float a name over micro-batches and ranks, whatever it is, and stops
with an error at a name that only some micro-batches have: then only numbers that may be averaged are reported, always
all of them.
"""

from typing import Any

import torch

from trustrl.diagnostics import Sums
from trustrl.engines.ranks import over_ranks


def under_their_names(sums: Sums) -> dict[str, float]:
    """What the region did, under the names of verl's own losses; where there was no token, 0 as in verl."""
    added = sums.added
    capped = added.get("extra/capped", torch.zeros_like(added["tokens"]))
    # Asked for in every micro-batch: one wait for the device, and none of the other metrics.
    counted = torch.stack([added["stopped"], -added["log_ratio"], capped])
    per = torch.stack([added["tokens"], added["measured"], added["tokens"]]).clamp(min=1)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, (counted / per).tolist(), strict=True))


class StepSums:
    """One training step's sums on this rank."""

    def __init__(self) -> None:
        self.updates = 0
        self._sums: Sums | None = None

    def add(self, sums: Sums) -> None:
        """Takes in one micro-batch."""
        self._sums = sums if self._sums is None else self._sums + sums

    def total(self, group: Any) -> Sums | None:
        """Over the step's tokens on all ranks; losses as the mean of the step's updates."""
        if self._sums is None:  # a pipeline's stage without a loss; so are the other ranks of its group
            return None
        total = over_ranks(self._sums, group)
        for name in total.added:
            if name.startswith("loss/") or name == "loss_weight":
                total.added[name] /= max(self.updates, 1)
        return total
