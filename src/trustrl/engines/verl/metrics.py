"""The region's metrics as verl's policy losses report theirs: one float a name and micro-batch.

verl averages them over micro-batches and ranks, whatever they are, and stops with an error at a name that only some
micro-batches have. So only numbers that may be averaged are here, always all of them.
"""

import torch

from trustrl.diagnostics import Sums, rates
from trustrl.metrics import METRICS

AVERAGES = {
    "masked_share", "masked_share_increase", "masked_share_decrease", "bad_update_share", "gap_mean", "gap_abs_mean",
    "ratio_mean", "weight_mean", "capped_share", "kl_k1", "kl_k2", "kl_k3", "effective_sample_share", "chi_square",
    "divergence_mean", "undecided_share", "dropped_share", "tokens",
    "fault_policy", "fault_behavior", "fault_proximal", "fault_advantage", "fault_overflow",
}  # fmt: skip
"""No maxima, minima and quantiles: verl's average of them over micro-batches would be none of a step's."""


def reported(sums: Sums) -> dict[str, float]:
    """Our averages under our names, and what the region did under verl's. Where there was no token, 0 as in verl."""
    found = rates(sums)
    names = [
        f"trustrl/{metric.name}"
        for metric in METRICS
        if metric.name in AVERAGES and all(part in sums.added for part in metric.reads)
    ]
    ours = {name: found.get(name, 0.0) for name in names}
    nothing = torch.zeros_like(sums.added["tokens"])
    stopped, capped = sums.added["stopped"], sums.added.get("extra/capped", nothing)
    shares = torch.stack([stopped, capped]) / sums.added["tokens"].clamp(min=1)
    clipped, capped_share = shares.tolist()
    return ours | {
        "actor/pg_clipfrac": clipped,
        "actor/ppo_kl": found.get("trustrl/kl_k1", 0.0),
        "actor/pg_clipfrac_lower": capped_share,
    }
