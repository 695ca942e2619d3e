"""Rules on what lies between sampler and trainer while their weights should be the same.

k = π'/μ, Δ = log k, over tokens that μ sampled. Where the two are one policy, Δ is rounding. When the difference began
and which sign it has tell the causes apart; a run's records, where it has them, tell a temperature from other weights.
"""

import math

from trustrl.explain.evidence import Evidence, Point, middle, points
from trustrl.explain.findings import Finding, Number, Order, confidence
from trustrl.explain.tokens import line_of
from trustrl.probe.diagnosis import EXACT, WHAT_TO_DO

GAP, RATIO, ENTROPY = "trustrl/mismatch_abs_mean", "trustrl/mismatch_ratio_mean", "trustrl/entropy"

HALF_PRECISION = 0.04
"""Mean |Δ| in nats that a sampler in half precision may have: the upper end of the metric dictionary's band."""

HALF_PRECISION_STARTS = 0.01
"""The lower end of that band: what a gap must reach at least before its growth counts."""

GROWTH = 5.0
"""By what factor a gap has grown that was not there at the start: rounding changes little while a policy sharpens."""

ONE_SIDED = 0.5
"""Share of the mean |Δ| by which the mean of k falls short of 1. Where μ covers what π' allows, k averages 1."""

HALF_OF_THE_MASS = math.log(2)
"""The largest mean |Δ| that truncation makes: a sampler keeps at least half of the mass, so Δ ≥ −log 2."""

UNSEEN = 0.5
"""What is left of the confidence where temperature and weights are told apart without looking at tokens."""


def stale_weights(run: Evidence) -> Finding | None:
    """Weights that do not reach the sampler: no gap at the first batch, where both are the loaded model, then one."""
    gaps = _gaps(run)
    if len(gaps) < 2:
        return None
    later = gaps[len(gaps) // 2 :]
    limit = max(EXACT if _is_exact(run) else HALF_PRECISION_STARTS, GROWTH * gaps[0][1])
    if gaps[0][1] > _limit(run) or middle(later) <= limit or _one_sided(run):
        return None
    numbers = (Number(GAP, later[0][0], middle(later), limit, "above", "median of the batches in the second half"),)
    return Finding(
        "stale weights", Order.SAMPLER, confidence(numbers),
        f"Sampler and trainer agreed at the first batch ({gaps[0][1]:.2g} nats) and do not any more.",
        numbers, "Send the trainer's weights to the sampler after every batch, and look whether they arrive.",
    )  # fmt: skip


def truncated_support(run: Evidence) -> Finding | None:
    """Top-p or top-k renormalises μ over fewer ids, so π' ≤ μ at every token: Δ has one sign and k averages below 1."""
    ratios, gaps = points(run.first_updates(), RATIO), _gaps(run)
    if not _one_sided(run):
        return None
    numbers = (
        Number(RATIO, ratios[0][0], middle(ratios), 1 - EXACT, "below", "median over batches"),
        Number(GAP, gaps[0][0], middle(gaps), EXACT, "above", "median over batches"),
    )
    share = _shortfall(run) / middle(gaps)
    return Finding(
        "truncated support", Order.SAMPLER, confidence(numbers[1:]),
        f"Tokens are less likely to the trainer than to the sampler, hardly ever more: {share:.0%} of the mean gap is "
        "missing from the mean ratio.",
        numbers, WHAT_TO_DO["truncation"],
    )  # fmt: skip


def wrong_temperature(run: Evidence) -> Finding | None:
    """A gap from the first batch on that another temperature explains.

    With records, the gap must lie along a line over log μ. Without, its size must be one that a temperature can have: a
    colder sampler's KL to the trainer's policy is at most that policy's entropy.
    """
    return _from_the_start(run, "temperature")


def tied_head_not_synced(run: Evidence) -> Finding | None:
    """A gap from the first batch on that no setting explains: the sampler has other weights, often an output layer."""
    return _from_the_start(run, "weights")


def _from_the_start(run: Evidence, cause: str) -> Finding | None:
    gaps = _gaps(run)
    if not gaps or _one_sided(run) or min(gaps[0][1], middle(gaps)) <= EXACT:
        return None
    line = line_of(run)
    # Rounding draws no line: where there is one, the gap is real below the noise of half precision too.
    limit = EXACT if line is not None and line.is_temperature else _limit(run)
    if min(gaps[0][1], middle(gaps)) <= limit:
        return None
    numbers = (Number(GAP, gaps[0][0], gaps[0][1], limit, "above", "at the first batch"),)
    if line is not None:
        temperature = line.is_temperature
        how = (
            f"over log μ the gap has the slope {line.slope:.2f}, which explains {line.explained:.0%} of it "
            f"({line.tokens:,} recorded tokens)"
        )
        sure = confidence(numbers)
    else:
        entropies = points(run.first_updates(), ENTROPY)
        temperature = bool(entropies) and gaps[0][1] <= entropies[0][1]
        how = f"the gap is {'within' if temperature else 'beyond'} the policy's entropy (no records to look at)"
        sure = UNSEEN * confidence(numbers)
    if temperature != (cause == "temperature"):
        return None
    name = "tied head not synced" if cause == "weights" else "wrong temperature"
    reason = f"Sampler and trainer disagree from the first batch on: {how}."
    return Finding(name, Order.SAMPLER, sure, reason, numbers, WHAT_TO_DO[cause])


def _gaps(run: Evidence) -> list[Point]:
    return points(run.first_updates(), GAP)


def _limit(run: Evidence) -> float:
    return EXACT if _is_exact(run) else HALF_PRECISION


def _is_exact(run: Evidence) -> bool:
    """Whether both sides compute in float32."""
    return run.recipe.model.dtype == run.recipe.sampler.dtype == "float32"


def _shortfall(run: Evidence) -> float:
    """By how much the mean of k is below 1."""
    ratios = points(run.first_updates(), RATIO)
    return 1 - middle(ratios) if ratios else 0.0


def _one_sided(run: Evidence) -> bool:
    short, gaps = _shortfall(run), _gaps(run)
    return bool(gaps) and short > EXACT and ONE_SIDED * middle(gaps) <= short and middle(gaps) <= HALF_OF_THE_MASS
