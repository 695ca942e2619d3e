"""Metrics of a run under the names that rules read, arranged by batch and update.

Rules count batches of rollouts, not steps: trainers log a row for each update, for each batch, or for every ten steps.

Readers already use trustrl's names where a trainer logs the same number. verl logs two estimators of KL(μ‖π'): the mean
of k = π'/μ follows from them, and the mean |Δ| is estimated.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from trustrl.runs.metric_names import ADVANTAGES
from trustrl.runs.run import Row, Run
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, rollouts_in_a_mean, windows
from trustrl.tools.explain.recorded_gap import tokens_of
from trustrl.tools.explain.sampled_batches import SampledBatch, sampled_batches

if TYPE_CHECKING:
    from torch import Tensor

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

EQUAL_GROUPS = 0.9
"""Share of groups with identical rewards from which a batch has no learning signal. Their advantages are 0."""

Point = tuple[int, float]
"""A step and the value measured there."""


@dataclass(frozen=True)
class Evidence:
    """One run, as the rules read it."""

    run: Run

    @cached_property
    def rows(self) -> list[Row]:
        """Rows in order of steps, with the metrics that follow from others."""
        return sorted(map(named, self.run.rows), key=lambda row: row["step"])

    @cached_property
    def by_update(self) -> bool:
        """True if each row is one optimizer step. Otherwise a row is a mean over several."""
        steps = [row["step"] for row in self.rows]
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        return self.run.row_is == "update" and (not gaps or int(median(gaps)) == 1)

    @cached_property
    def updates_per_batch(self) -> int | None:
        """The setting, or the distance between rows with a reward if it is unknown. None if neither is known."""
        known = self.run.settings.updates_per_batch
        return known if known is not None else self.updates_from_rewards

    @cached_property
    def updates_from_rewards(self) -> int | None:
        """Distance between rows with a reward, if it is constant. TRL logs the reward when it samples a batch."""
        steps = [row["step"] for row in self.rows if REWARD in row]
        gaps = {b - a for a, b in itertools.pairwise(steps)}
        return gaps.pop() if self.by_update and len(steps) > FEWEST_ROLLOUTS and len(gaps) == 1 else None

    @cached_property
    def batches(self) -> list[list[Row]]:
        """Rows of each batch of rollouts. A row that covers several batches counts as one."""
        updates = self.updates_per_batch
        if self.run.row_is == "batch" or updates is None:
            return [[row] for row in self.rows]
        batches: dict[int, list[Row]] = {}
        for row in self.rows:
            batches.setdefault((row["step"] - 1) // updates, []).append(row)
        return list(batches.values())

    def per_batch(self, metric: str) -> list[Point]:
        """Returns the first finite value of each batch, for metrics of the rollouts themselves."""
        return [series[0] for rows in self.batches if (series := points(rows, metric))]

    def at_update(self, index: int, metric: str) -> list[Point]:
        """Returns the values at one update of each batch that has a gradient; −1 is the last update.

        The list is empty if rows are not single updates or the number of updates per batch is unknown.
        """
        updates = self.updates_per_batch
        if not self.by_update or updates is None:
            return []
        wanted = index % updates
        rows = [row for batch in self.moving for row in batch if (row["step"] - 1) % updates == wanted]
        return points(rows, metric)

    @cached_property
    def moving(self) -> list[list[Row]]:
        """Batches with a gradient. If all groups of a batch have equal rewards, the policy does not move."""
        return [rows for rows in self.batches if not _is_still(rows)]

    @cached_property
    def sampled(self) -> list[SampledBatch]:
        """Facts about the completions of each step."""
        return sampled_batches(self.run)

    @cached_property
    def first_tokens(self) -> "Mapping[str, Tensor] | None":
        """Columns of the first recorded tokens of which sampler and trainer are known. None if there are none."""
        return tokens_of(self.run)

    @cached_property
    def last_tokens(self) -> "Mapping[str, Tensor] | None":
        """The same of the last recorded tokens."""
        return tokens_of(self.run, newest=True)

    @cached_property
    def mean_rewards(self) -> list[float]:
        """Running means of the reward over at least `FEWEST_ROLLOUTS` batches. Empty if there are fewer."""
        rewards = [reward for _, reward in self.per_batch(REWARD)]
        width = rollouts_in_a_mean(len(rewards))
        return windows(rewards, width)[width - 1 :]

    @cached_property
    def evaluations(self) -> list[Row]:
        """Evaluations whose number of problems is known, so that their standard error is too."""
        return [row for row in self.run.evaluations if row.get("count") and row.get("accuracy") is not None]


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


def _is_still(rows: Sequence[Row]) -> bool:
    equal, gradients = points(rows, EQUAL), points(rows, GRADIENT)
    if equal:
        return equal[0][1] >= EQUAL_GROUPS
    return bool(gradients) and max(norm for _, norm in gradients) == 0


def points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """Returns the finite values of a metric with their steps."""
    return [(row["step"], float(row[metric])) for row in rows if row.get(metric) is not None]


def middle(series: Sequence[Point]) -> float:
    """Returns the median value, which single batches do not affect."""
    return median(value for _, value in series)


def onset(series: Sequence[Point], limit: float, side: Literal["above", "below"]) -> int:
    """Returns the first step from which `FEWEST_ROLLOUTS` values in a row lie beyond the limit.

    Returns:
        The first step of the series if there is none.

    Example:
        >>> onset([(step, float(step in (2, 5, 6, 7))) for step in range(9)], 0.5, "above")
        5
    """
    beyond = [value > limit if side == "above" else value < limit for _, value in series]
    starts = range(len(series) - FEWEST_ROLLOUTS + 1)
    return next((series[start][0] for start in starts if all(beyond[start : start + FEWEST_ROLLOUTS])), series[0][0])


def first_and_last(series: Sequence[Point], share: int) -> tuple[Sequence[Point], Sequence[Point]] | None:
    """Returns the first and the last values: one of `share` parts, and at least `FEWEST_ROLLOUTS` values each.

    Returns:
        None if the two would overlap, since a window of one batch shows nothing.
    """
    width = max(FEWEST_ROLLOUTS, len(series) // share)
    return (series[:FEWEST_ROLLOUTS], series[-width:]) if len(series) >= width + FEWEST_ROLLOUTS else None
