"""Metrics of one micro-batch for trainers that average one float a name over micro-batches and ranks.

Such a trainer knows nothing of sums, and often stops at a name that only some micro-batches have: only numbers that may
be averaged are reported, always all of them.
"""

from trustrl.diagnostics import Sums, rates
from trustrl.metrics import METRICS

AVERAGES = {
    "masked_share", "masked_share_increase", "masked_share_decrease", "bad_update_share", "gap_mean", "gap_abs_mean",
    "ratio_mean", "weight_mean", "capped_share", "kl_k1", "kl_k2", "kl_k3", "effective_sample_share", "chi_square",
    "divergence_mean", "undecided_share", "dropped_share", "tokens",
    "fault_policy", "fault_behavior", "fault_proximal", "fault_advantage", "fault_overflow",
}  # fmt: skip
"""No maxima, minima and quantiles: their average over micro-batches would be none of a step's."""


def averages(sums: Sums, more: frozenset[str] = frozenset()) -> dict[str, float]:
    """Of one micro-batch; where there was no token, 0.

    Args:
        sums: What the region did.
        more: Further metrics that this trainer knows how to combine.
    """
    found = rates(sums)
    names = [
        f"trustrl/{metric.name}"
        for metric in METRICS
        if metric.name in AVERAGES | more and all(part in sums.added or part in sums.highest for part in metric.reads)
    ]
    return {name: found.get(name, 0.0) for name in names}
