"""Sums of a training step over micro-batches, updates, and ranks, and the metrics that trainers may average."""

from typing import Any

import torch
from torch import Tensor

from trustrl.core.diagnostics import Sums, rates
from trustrl.core.metrics import CORE, METRICS, Choice, check_choice

AVERAGES = {
    "masked_share", "masked_share_increase", "masked_share_decrease", "bad_update_share", "gap_mean", "gap_abs_mean",
    "ratio_mean", "weight_mean", "capped_share", "kl_k1", "kl_k2", "kl_k3", "effective_sample_share", "chi_square",
    "divergence_mean", "undecided_share", "dropped_share", "tokens", "staleness_mean", "stale_share",
    "fault_policy", "fault_behavior", "fault_proximal", "fault_advantage", "fault_overflow",
}  # fmt: skip
"""Metrics that may be averaged over micro-batches. Maxima, minima, and quantiles are not among them: the average of
those over micro-batches differs from the step's value."""


def averages(sums: Sums, metrics: Choice, more: frozenset[str] = frozenset()) -> dict[str, float]:
    """Returns the metrics of one micro-batch, for trainers that average one float per name.

    Such a trainer does not add sums, and often fails on a name that only some micro-batches report. So this returns
    only metrics that may be averaged, and always all of them.

    Args:
        sums: The sums of the micro-batch.
        metrics: The metrics to log. "core" leaves out the counts of faults, which must be logged always or never.
        more: Further metrics that the trainer combines correctly.

    Returns:
        Each metric by name; 0 if the micro-batch has no tokens.
    """
    check_choice(metrics)
    values = rates(on_host(sums))
    wanted = (AVERAGES | more) & set(CORE) if metrics == "core" else AVERAGES | more
    names = [
        f"trustrl/{metric.name}"
        for metric in METRICS
        if metric.name in wanted and all(part in sums.added or part in sums.highest for part in metric.reads)
    ]
    return {name: values.get(name, 0.0) for name in names}


def share_of_one_rank(sums: Sums, weights: Tensor, ranks: int) -> Sums:
    """Returns the sums of one micro-batch, scaled so that ranks can add them: losses average over ranks, counts add.

    Args:
        sums: The sums of the micro-batch.
        weights: The factor that the trainer multiplies each token's loss by.
        ranks: The number of ranks.
    """
    added = {name: x / ranks if name.startswith("loss/") else x for name, x in sums.added.items()}
    added["loss_weight"] = weights.sum(dtype=torch.float64) / ranks
    return Sums(added, dict(sums.highest))


def over_ranks(sums: Sums, group: Any = None) -> Sums:
    """Returns the sums over all ranks. Costs two all-reduces of about 2,500 numbers in total."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return sums
    added, highest = sums.flat()
    torch.distributed.all_reduce(added, group=group)
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    return sums.unflat(added, highest)


def on_host(sums: Sums) -> Sums:
    """Returns a copy of the sums in host memory, which can be read without waiting. Waits for the device once."""
    added, highest = sums.flat()
    both = torch.cat([added, highest]).cpu()
    return sums.unflat(both[: len(added)], both[len(added) :])


class StepSums:
    """The sums of one training step on this rank, over the micro-batches of several updates."""

    def __init__(self) -> None:
        self.updates = 0
        self._sums: Sums | None = None

    def add(self, sums: Sums) -> None:
        """Adds one micro-batch."""
        self._sums = sums if self._sums is None else self._sums + sums

    def total(self, group: Any) -> Sums | None:
        """Returns the sums over the step's tokens on all ranks; losses are the mean over the step's updates."""
        if self._sums is None:  # a pipeline stage without a loss, as on the other ranks of its group
            return None
        total = over_ranks(self._sums, group)
        for name in total.added:
            if name.startswith("loss/") or name == "loss_weight":
                total.added[name] /= max(self.updates, 1)
        return total
