"""Checks on a region's metrics: steps that drop their tokens, and regions that cannot act."""

import warnings
from collections.abc import Mapping
from typing import Any

from trustrl.config import checks
from trustrl.config.axes import Region
from trustrl.config.regions import PolicyGradient
from trustrl.diagnostics import dropped_because
from trustrl.errors import NonFiniteError, TrustRLWarning

WARN_SHARE = 0.01
"""Share of dropped tokens above which a run is told once; a healthy step drops none."""

MAX_DROPPED_SHARE = 0.5
"""Default share of dropped tokens above which a step raises."""

ACTS = {"trustrl/undecided_share": "trustrl/masked_share", "trustrl/projected_share": "trustrl/projected_share"}
"""Metrics that only regions with thresholds report, and the metric that is above 0 once such a region has acted."""


class StepCheck:
    """Looks at the metrics of every optimizer step, summed over micro-batches and ranks."""

    def __init__(
        self, region: Region, *, max_dropped_share: Any, setting: str, updates_per_batch: int = 1, speaks: bool = True
    ) -> None:
        """Creates a check for one run.

        Args:
            region: The region of the run.
            max_dropped_share: Largest share of dropped tokens that a step may have; 1 never raises.
            setting: The name of that setting in the engine, for errors.
            updates_per_batch: How many calls of `look` belong to the first batch.
            speaks: Whether this rank warns. Every rank raises.

        Raises:
            ConfigError: `max_dropped_share` is not a share.
        """
        checks.real(setting, max_dropped_share, rule="a share in (0, 1]", low=0.0, high=1.0)
        self._region = region
        self._max_dropped_share = max_dropped_share
        self._setting = setting
        self._updates_left = updates_per_batch
        self._speaks = speaks
        self._told_dropped = False
        self._acted = False

    def look(self, metrics: Mapping[str, float]) -> None:
        """Checks one step. Warns once about dropped tokens, and once if the region masked nothing in the first batch.

        Args:
            metrics: What `trustrl.rates` made of the step's sums; already on the host, so this waits for nothing.

        Raises:
            NonFiniteError: the step dropped more tokens than allowed; says why.
        """
        dropped = metrics.get("trustrl/dropped_share", 0.0)
        if dropped > self._max_dropped_share:
            raise NonFiniteError(
                f"A step must drop at most {self._max_dropped_share:.0%} of its tokens, got {dropped:.0%}: "
                f"{dropped_because(metrics)}. Fix the cause, or raise {self._setting} to train on what is left."
            )
        if dropped > WARN_SHARE and not self._told_dropped:
            self._told_dropped = True
            self._warn(
                f"{dropped:.1%} of this step's tokens were dropped: {dropped_because(metrics)}. They stay in the "
                "denominator. The trustrl/fault_ metrics count each kind; later steps do not repeat this warning."
            )
        acted = [metrics.get(share, 0.0) > 0 for threshold, share in ACTS.items() if threshold in metrics]
        self._acted = self._acted or any(acted)
        self._updates_left -= 1
        if self._updates_left == 0 and acted and not self._acted:
            self._warn(
                f"{self._region.kind} masked no token in the first batch of updates (largest ratio "
                f"{metrics.get('trustrl/ratio_max', 1.0):.6g}). Small first steps explain that; if masked_share stays "
                "at 0, the region does nothing. `trustrl calibrate` recommends a threshold from recorded tokens."
            )

    def _warn(self, message: str) -> None:
        if self._speaks:
            warnings.warn(message, TrustRLWarning, stacklevel=3)


def warn_if_it_cannot_act(region: Region, *, updates_per_batch: float, remedy: str) -> None:
    """Warns if every ratio will be 1: one update per batch, against the trainer's own log-probs at the same weights.

    Args:
        region: A region whose anchors the trainer records.
        updates_per_batch: How many optimizer steps use one batch of rollouts.
        remedy: The engine's settings that change that.
    """
    if updates_per_batch <= 1 and not isinstance(region, PolicyGradient):
        warnings.warn(
            f"{region.kind} cannot act: the trainer records the anchor at the weights of the only update of each "
            f"batch, so every ratio is 1. {remedy}",
            TrustRLWarning,
            stacklevel=3,
        )
