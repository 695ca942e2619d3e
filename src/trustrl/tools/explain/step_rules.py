"""Diagnostic rules for how far the policy moves, in one update and over all updates on one batch.

A large move is a cause only if the run was harmed, so these rules require both. The exception is a region that masks
so many tokens that the batch is exhausted.

Some trainers log one row for all updates on a batch. The KL of a row is then the mean over updates 0 to U − 1, of which
update 0 has none. If the distance grows with the square root of the updates, as steps without a common direction do,
one update adds 2 / (U − 1) of the mean to the KL; if it grows with their number, 6 / ((U − 1)(2U − 1)). The rules
decide by the geometric mean of the two, and give both.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from trustrl.runs.run import Row
from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, windows
from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.changes import fewer_updates, lower_learning_rate
from trustrl.tools.explain.evidence import (
    CLIPPED,
    ENTROPY,
    GAP,
    KL,
    MASKED,
    REWARD,
    Evidence,
    Point,
    middle,
    onset,
    points,
)
from trustrl.tools.explain.sampler_rules import gap_limit
from trustrl.tools.explain.signal_rules import fell, harms

KL_OF_ONE_UPDATE = 0.02
"""KL in nats that one optimizer step adds: twice the healthy value of the metric dictionary for a whole batch."""

CLIPPED_OF_ONE_UPDATE = 0.1
"""Share of tokens that the trainer's clipping stops after one update. Between 0.8 and 1.2, a KL of 0.02 nats that is
spread evenly moves about 30% of the ratios out, and half of these in the direction that is stopped."""

ENTROPY_CHANGE = 0.5
"""|log(H after / H before)| of one update: more than a factor of 1.6. In 40 healthy runs it was 0.09 to 0.28."""

ENTROPY_STEP = "entropy change"
"""Name of that number. It follows from two rows, so none logs it."""

CHANGES = 3
"""Number of largest changes to average, so that one odd batch is not enough."""

KL_OF_A_BATCH = 0.05
"""KL in nats that the updates on a batch add: five times the healthy value of the metric dictionary."""

MASKED_OF_A_BATCH = 0.1
"""Share of tokens masked at the end of a batch, in excess of its first update. Healthy: below 5% with 4 updates."""

BATCHES_TO_BREAK = 2
"""Batches before a break of the reward whose updates may have caused it."""

LEAST_ENTROPY = 1e-3
"""Floor for entropies, below which their ratios are meaningless."""


def learning_rate_too_large(run: Evidence) -> Cause | None:
    """Detects single updates that move the policy too far, in a run that was harmed.

    The distance is, in this order: the KL at the second update of a batch minus the KL at the first, which contains
    only the mismatch; the same for the clipped share; an estimate from the mean KL over a batch's updates; and the
    change of entropy from one update to the next. A policy that breaks at once leaves later batches without a signal,
    so medians over all batches miss it. If the reward broke off, the largest move just before counts as well.
    """
    harm = harms(run)
    moved = one_update(run)
    if moved is None or moved.excess <= 0:
        moved = move_before_break(run)
    if moved is None or not harm:
        return None
    numbers = (moved, *harm)
    # The KL of a step grows with the square of the learning rate.
    too_far = math.sqrt(max(1.0, (moved.value or 0.0) / moved.limit))
    return Cause(
        "learning rate too large", Order.STEP, confidence(numbers),
        f"Single updates move the policy too far, and the run broke.{_range(run, moved)}", numbers,
        "Lower the learning rate by a factor of 3 to 10.", lower_learning_rate(run.run, too_far), "log_ratio",
    )  # fmt: skip


def too_many_updates(run: Evidence) -> Cause | None:
    """Detects updates that are small one by one but together leave the region.

    Either the region masks a large share of tokens at the end of a batch, or the policy has moved far by then and the
    run was harmed.
    """
    updates, distance = run.updates_per_batch, one_update(run)
    if (
        updates is None
        or updates == 1
        or move_before_break(run) is not None
        or (distance is not None and distance.metric != ENTROPY_STEP and distance.excess > 0)
    ):
        return None
    harm = harms(run)
    moved = [_grown(run, MASKED, MASKED_OF_A_BATCH)]
    if harm:
        moved += [_grown(run, KL, KL_OF_A_BATCH), _grown(run, CLIPPED, MASKED_OF_A_BATCH)]
    far = [number for number in moved if number is not None]
    if not far:
        return None
    numbers = (*far, *harm)
    return Cause(
        "too many updates per batch", Order.STEP, confidence(numbers),
        f"Each of the {updates} updates is small, but together they move the policy far from the sampler."
        + ("" if distance is None else _range(run, distance)),
        numbers, "Lower the number of updates on each batch, or choose a tighter region.",
        fewer_updates(run.run, updates), "log_ratio",
    )  # fmt: skip


def one_update(run: Evidence) -> Number | None:
    """Returns how far one update moves the policy, or None if that was not measured."""
    for metric, limit in ((KL, KL_OF_ONE_UPDATE), (CLIPPED, CLIPPED_OF_ONE_UPDATE)):
        seconds = [] if run.updates_per_batch == 1 else run.at_update(1, metric)
        if seconds:
            return _added(run, metric, seconds, limit, "median of second updates minus median of first updates")
    bounds = _bounds(run)
    if bounds is not None:
        low, high, step = bounds
        what = "estimate for one update from the mean over a batch's updates"
        return Number(KL, step, math.sqrt(low * high), KL_OF_ONE_UPDATE, "above", what)
    if not (run.by_update or run.updates_per_batch == 1):
        return None
    rows = run.rows if run.by_update else [batch[0] for batch in run.batches]
    largest = sorted(_entropy_changes(rows), key=lambda change: -change[1])[:CHANGES]
    if len(largest) < CHANGES:
        return None
    mean = sum(value for _, value in largest) / CHANGES
    return Number(ENTROPY_STEP, min(step for step, _ in largest), mean, ENTROPY_CHANGE, "above", "three largest")


def move_before_break(run: Evidence) -> Number | None:
    """Returns the largest move of one update before the reward broke off, if it is beyond its limit."""
    broken = _broken_batch(run)
    if broken is None or not (run.by_update or run.updates_per_batch == 1):
        return None
    before = run.batches[max(0, broken - BATCHES_TO_BREAK) : broken]
    rows = [row for batch in before for row in batch]
    what = f"largest in the {len(before)} batches before the reward broke off at step {run.batches[broken][0]['step']}"
    moves = [
        Number(metric, values[1][0], values[1][1] - values[0][1], limit, "above", what)
        for metric, limit in ((KL, KL_OF_ONE_UPDATE), (CLIPPED, CLIPPED_OF_ONE_UPDATE))
        for batch in before
        if len(values := points(batch, metric)) > 1
    ]
    moves += [
        Number(ENTROPY_STEP, step, change, ENTROPY_CHANGE, "above", what)
        for step, change in _entropy_changes([*rows, run.batches[broken][0]])
    ]
    return max((move for move in moves if move.excess > 0), key=lambda move: move.excess, default=None)


def _broken_batch(run: Evidence) -> int | None:
    """Returns the first batch from which on the reward stays below half of that of the batches before."""
    rewards = [next((value for _, value in points(batch, REWARD)), 0.0) for batch in run.batches]
    for batch in range(1, len(rewards) - FEWEST_ROLLOUTS + 1):
        before = rewards[max(0, batch - FEWEST_ROLLOUTS) : batch]
        half = sum(before) / len(before) / 2
        later = windows(rewards[batch:], FEWEST_ROLLOUTS)[FEWEST_ROLLOUTS - 1 :]
        if rewards[batch] < half and max(later) < half:
            return batch
    return None


def _entropy_changes(rows: Sequence[Row]) -> list[Point]:
    """Returns |log of the ratio| of the entropies of neighboring rows, with the later step."""
    held = [(step, math.log(max(value, LEAST_ENTROPY))) for step, value in points(rows, ENTROPY)]
    return [(after[0], abs(after[1] - before[1])) for before, after in pairwise(held)]


def hidden_by_the_gap(run: Evidence) -> bool:
    """Returns whether the KL of a row contains a sampler's gap that cannot be taken out.

    It can be if rows are single updates, since the first update of a batch has the gap alone.
    """
    gaps = run.per_batch(GAP)
    return not run.by_update and bool(gaps) and middle(gaps) > gap_limit(run)


def _bounds(run: Evidence) -> tuple[float, float, int] | None:
    """Returns the smallest and largest KL that one update adds, by the law of growth, and the first step."""
    updates = run.updates_per_batch
    series = points([batch[0] for batch in run.moving], KL)
    if run.by_update or updates is None or updates == 1 or not series or hidden_by_the_gap(run):
        return None
    mean = max(0.0, middle(series))
    return 6 * mean / ((updates - 1) * (2 * updates - 1)), 2 * mean / (updates - 1), series[0][0]


def _range(run: Evidence, moved: Number) -> str:
    """Returns a sentence with the bounds of an estimate; empty if the distance was measured."""
    bounds = _bounds(run)
    if bounds is None or moved.metric != KL:
        return ""
    low, high = (f"{bound:.2g}" for bound in bounds[:2])
    added = f"about {low}" if low == high else f"between {low} and {high}"
    return f" The run logs one row for several updates: one update adds {added} nats."


def _grown(run: Evidence, metric: str, limit: float) -> Number | None:
    """Returns the metric at the end of batches if the updates on a batch moved it beyond its limit."""
    if run.by_update:
        lasts, what = run.at_update(-1, metric), "median of last updates minus median of first updates"
    elif hidden_by_the_gap(run):
        return None
    else:
        lasts, what = run.per_batch(metric), "median over batches of the mean over their updates"
    if not lasts:
        return None
    numbers = [_added(run, metric, lasts, limit, what)]
    # A policy that broke in the first batches moves little later.
    if metric != MASKED and len(lasts) >= 2 * FEWEST_ROLLOUTS and fell(run):
        early = f"{what}, first {FEWEST_ROLLOUTS} batches"
        numbers.append(_added(run, metric, lasts[:FEWEST_ROLLOUTS], limit, early))
    return next((number for number in numbers if number.excess > 0), None)


def _added(run: Evidence, metric: str, later: list[Point], limit: float, what: str) -> Number:
    """Returns the increase of a metric over a batch's updates.

    If rows are means over updates, the first update is unknown and counts as 0.
    """
    firsts = run.at_update(0, metric)
    before = middle(firsts) if firsts else 0.0
    return Number(metric, onset(later, before + limit, "above"), max(0.0, middle(later) - before), limit, "above", what)
