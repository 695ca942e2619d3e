"""Metrics that rules read, and those that follow from other numbers.

Readers already use trustrl's names where a trainer logs the same number. verl logs two estimators of KL(μ‖π'): the mean
of k = π'/μ follows from them, and the mean |Δ| is estimated.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trustrl.runs.metric_names import ADVANTAGES

REWARD, LOSS, GRADIENT = "reward", "loss", "grad_norm"
EQUAL, UNSCORED = "frac_reward_zero_std", "frac_reward_nan"
ENTROPY, KL, MASKED = "trustrl/entropy", "trustrl/kl_k3", "trustrl/masked_share"
GAP, RATIO = "trustrl/mismatch_abs_mean", "trustrl/mismatch_ratio_mean"
CLIPPED = "clip_share"
"""Share of tokens that the trainer's own clipping stops."""

LARGEST_RATIO = "sampling/importance_sampling_ratio/max"

NAMES: dict[str, tuple[str, ...]] = {
    ENTROPY: ("entropy",),
    KL: ("trustrl/kl_k1",),  # verl's ppo_kl
    RATIO: ("sampling/importance_sampling_ratio/mean",),  # per sequence in TRL
}
"""Other names of a metric, in order of preference."""

K1, K3 = "rollout_corr/kl", "rollout_corr/k3_kl"
NO_ADVANTAGE = 1e-6
"""Largest |advantage| of a batch whose groups all have equal rewards. It is 0 up to rounding."""


def named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with every metric that its values determine, under the names of this module.

    Example:
        >>> metrics = named({"step": 3, "rollout_corr/kl": 0.02, "rollout_corr/k3_kl": 0.0002})
        >>> round(metrics["trustrl/mismatch_ratio_mean"], 4), round(metrics["trustrl/mismatch_abs_mean"], 4)
        (0.9802, 0.02)
    """
    metrics = dict(row)
    for metric, others in NAMES.items():
        other = next((name for name in others if name in row), None)
        if metric not in metrics and other is not None:
            metrics[metric] = row[other]
    k1, k3 = row.get(K1), row.get(K3)
    if k3 is not None:
        metrics.setdefault(GAP, math.sqrt(2 * max(k3, 0.0)))  # k3 = Δ²/2 + O(Δ³)
        if k1 is not None:
            metrics.setdefault(RATIO, 1 + k3 - k1)  # k1 = −mean Δ, k3 = mean k − 1 − mean Δ
    if all(row.get(name) is not None for name in ADVANTAGES):
        largest = max(abs(row[name]) for name in ADVANTAGES)
        metrics.setdefault(EQUAL, 1.0 if largest <= NO_ADVANTAGE else 0.0)
    return metrics


def origin(rows: Iterable[Mapping[str, Any]], metric: str) -> str | None:
    """Returns the logged metrics that a metric was computed from, or None if it was logged itself.

    Example:
        >>> origin([{"step": 3, "rollout_corr/kl": 0.02, "rollout_corr/k3_kl": 0.0002}], "trustrl/mismatch_ratio_mean")
        'rollout_corr/kl, rollout_corr/k3_kl'
    """
    logged = {name for row in rows for name in row}
    if metric in logged:
        return None
    derived = {GAP: (K3,), RATIO: (K1, K3), EQUAL: ADVANTAGES}
    candidates = [*((name,) for name in NAMES.get(metric, ())), *([derived[metric]] if metric in derived else [])]
    return next((", ".join(names) for names in candidates if logged.issuperset(names)), None)
