"""Diagnostic rules for the gap between sampler and trainer at the same weights.

k = π'/μ and Δ = log k, over tokens that μ sampled. If both are the same policy, Δ is rounding. The onset and the sign
of the gap separate the causes. If the run has records, they separate a wrong temperature from wrong weights.
"""

import math

from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.evidence import Evidence, Point, middle, points
from trustrl.tools.explain.recorded_gap import line_of
from trustrl.tools.probe import EXACT, WHAT_TO_DO

GAP, RATIO, ENTROPY = "trustrl/mismatch_abs_mean", "trustrl/mismatch_ratio_mean", "trustrl/entropy"

HALF_PRECISION = 0.04
"""Largest mean |Δ| in nats of a healthy half-precision sampler: the upper end of the metric dictionary's range."""

HALF_PRECISION_STARTS = 0.01
"""Lower end of that range: the smallest gap whose growth counts."""

GROWTH = 5.0
"""Growth factor of a gap that stale weights cause. Rounding changes little while a policy sharpens."""

ONE_SIDED = 0.5
"""Shortfall of the mean of k below 1, as a share of the mean |Δ|. If μ covers the support of π', k averages 1."""

HALF_OF_THE_MASS = math.log(2)
"""Largest mean |Δ| that truncation causes: a sampler keeps at least half of the mass, so Δ ≥ −log 2."""

UNSEEN = 0.5
"""Factor on the confidence when temperature and weights are separated without recorded tokens."""


def stale_weights(run: Evidence) -> Cause | None:
    """Detects weights that do not reach the sampler: a gap that is absent at the first batch and present later."""
    gaps = _gaps(run)
    if len(gaps) < 2:
        return None
    later = gaps[len(gaps) // 2 :]
    limit = max(EXACT if _is_exact(run) else HALF_PRECISION_STARTS, GROWTH * gaps[0][1])
    if gaps[0][1] > _limit(run) or middle(later) <= limit or _one_sided(run):
        return None
    numbers = (Number(GAP, later[0][0], middle(later), limit, "above", "median of the batches in the second half"),)
    return Cause(
        "stale weights", Order.SAMPLER, confidence(numbers),
        f"Sampler and trainer agreed at the first batch ({gaps[0][1]:.2g} nats) but no longer do.",
        numbers, "Sync the trainer's weights to the sampler after every batch, and check that they arrive.",
    )  # fmt: skip


def truncated_support(run: Evidence) -> Cause | None:
    """Detects top-p or top-k in the sampler.

    Truncation renormalizes μ over fewer ids, so π' ≤ μ at every token: Δ has one sign and k averages below 1.
    """
    ratios, gaps = points(run.first_updates(), RATIO), _gaps(run)
    if not _one_sided(run):
        return None
    numbers = (
        Number(RATIO, ratios[0][0], middle(ratios), 1 - EXACT, "below", "median over batches"),
        Number(GAP, gaps[0][0], middle(gaps), EXACT, "above", "median over batches"),
    )
    share = _shortfall(run) / middle(gaps)
    return Cause(
        "truncated support", Order.SAMPLER, confidence(numbers[1:]),
        f"The trainer assigns tokens lower probability than the sampler, and almost never higher: the mean ratio falls "
        f"short of 1 by {share:.0%} of the mean gap.",
        numbers, WHAT_TO_DO["truncation"],
    )  # fmt: skip


def wrong_temperature(run: Evidence) -> Cause | None:
    """Detects a gap that exists from the first batch and that another temperature explains.

    With records, the gap must be linear in log μ. Without records, its size must be possible for a temperature: the
    KL of a colder sampler to the trainer's policy is at most that policy's entropy.
    """
    return _from_the_start(run, "temperature")


def tied_head_not_synced(run: Evidence) -> Cause | None:
    """Detects a gap that exists from the first batch and that no setting explains.

    The sampler then has other weights, often in the output layer.
    """
    return _from_the_start(run, "weights")


def _from_the_start(run: Evidence, cause: str) -> Cause | None:
    gaps = _gaps(run)
    if not gaps or _one_sided(run) or min(gaps[0][1], middle(gaps)) <= EXACT:
        return None
    line = line_of(run)
    # Rounding does not produce a line, so with one the gap is real even below half-precision noise.
    limit = EXACT if line is not None and line.is_temperature else _limit(run)
    if min(gaps[0][1], middle(gaps)) <= limit:
        return None
    numbers = (Number(GAP, gaps[0][0], gaps[0][1], limit, "above", "at the first batch"),)
    if line is not None:
        temperature = line.is_temperature
        how = (
            f"a line over log μ with slope {line.slope:.2f} explains {line.explained:.0%} of the gap "
            f"({line.tokens:,} recorded tokens)"
        )
        sure = confidence(numbers)
    else:
        entropies = points(run.first_updates(), ENTROPY)
        temperature = bool(entropies) and gaps[0][1] <= entropies[0][1]
        how = f"the gap is {'within' if temperature else 'beyond'} the policy's entropy (the run has no records)"
        sure = UNSEEN * confidence(numbers)
    if temperature != (cause == "temperature"):
        return None
    name = "tied head not synced" if cause == "weights" else "wrong temperature"
    reason = f"Sampler and trainer disagree from the first batch: {how}."
    return Cause(name, Order.SAMPLER, sure, reason, numbers, WHAT_TO_DO[cause])


def _gaps(run: Evidence) -> list[Point]:
    return points(run.first_updates(), GAP)


def _limit(run: Evidence) -> float:
    return EXACT if _is_exact(run) else HALF_PRECISION


def _is_exact(run: Evidence) -> bool:
    """Returns whether both sides compute in float32."""
    return run.recipe.model.dtype == run.recipe.sampler.dtype == "float32"


def _shortfall(run: Evidence) -> float:
    """Returns the shortfall of the mean of k below 1."""
    ratios = points(run.first_updates(), RATIO)
    return 1 - middle(ratios) if ratios else 0.0


def _one_sided(run: Evidence) -> bool:
    short, gaps = _shortfall(run), _gaps(run)
    return bool(gaps) and short > EXACT and ONE_SIDED * middle(gaps) <= short and middle(gaps) <= HALF_OF_THE_MASS
