"""Diagnostic rules for how far the policy moves, in one update and over all updates on one batch.

A large move is a cause only if the run was harmed, so these rules require both. The exception is a region that masks
so many tokens that the batch is exhausted.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from trustrl.runner.run_verdict import STANDARD_ERRORS, lowest_accuracy, lowest_reward, rollouts_in_a_mean
from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.evidence import Evidence, Point, middle, points
from trustrl.tools.explain.signal_rules import broken, entropy_left

KL, MASKED, ENTROPY = "trustrl/kl_k3", "trustrl/masked_share", "trustrl/entropy"

KL_OF_ONE_UPDATE = 0.02
"""KL in nats that one optimizer step adds: twice the healthy value of the metric dictionary for a whole batch."""

ENTROPY_CHANGE = 0.5
"""|log(H after / H before)| of one update: more than a factor of 1.6. In 40 healthy runs it was 0.09 to 0.28."""

CHANGES = 3
"""Number of largest changes to average, so that one odd batch is not enough."""

EXPLOSION = 2.0
"""Multiple of the first step's entropy at which entropy has exploded."""

KL_OF_A_BATCH = 0.05
"""KL in nats that the updates on a batch add: five times the healthy value of the metric dictionary."""

MASKED_OF_A_BATCH = 0.1
"""Share of tokens masked at the end of a batch, in excess of its first update. A healthy share is a few percent."""

LEAST_ENTROPY = 1e-3
"""Floor for entropies, below which their ratios are meaningless."""


def learning_rate_too_large(run: Evidence) -> Cause | None:
    """Detects single updates that move the policy too far, in a run whose reward or entropy broke.

    The distance is the KL at the second update of a batch minus the KL at the first, which contains only the mismatch.
    If batches have one update, it is the change of entropy from step to step, since nothing else is measured after it.
    """
    harm = harms(run)
    moved = _one_update(run)
    if moved is None or moved.excess <= 0 or not harm:
        return None
    numbers = (moved, *harm)
    return Cause(
        "learning rate too large", Order.STEP, confidence(numbers),
        "Single updates move the policy too far, and the run broke.", numbers,
        f"Lower optimiser.learning_rate (now {run.recipe.optimiser.learning_rate:g}) by a factor of 3 to 10.",
    )  # fmt: skip


def too_many_updates(run: Evidence) -> Cause | None:
    """Detects updates that are small one by one but together leave the region.

    Either the region masks a large share of tokens at the end of a batch, or the policy has moved far by then and the
    run was harmed.
    """
    updates = run.recipe.schedule.updates_per_batch
    one = _one_update(run)
    if updates == 1 or (one is not None and one.metric == KL and one.excess > 0):
        return None
    harm = harms(run)
    numbers = [
        *_grown(run, MASKED, MASKED_OF_A_BATCH),
        *(_grown(run, KL, KL_OF_A_BATCH) if harm else ()),
    ]
    if not numbers:
        return None
    numbers += harm
    return Cause(
        "too many updates per batch", Order.STEP, confidence(numbers),
        f"Each of the {updates} updates is small, but together they move the policy out of its region.",
        tuple(numbers), f"Lower schedule.updates_per_batch (now {updates}), or choose a tighter region.",
    )  # fmt: skip


def harms(run: Evidence) -> list[Number]:
    """Returns the signs of harm: held-out accuracy, reward, entropy in either direction, or a non-finite value."""
    found = _fallen(run)
    entropies = points(run.rows, ENTROPY)
    if entropies:
        first = entropies[0][1]
        step, most = max(entropies, key=lambda one: one[1])
        if most > EXPLOSION * first:
            found.append(
                Number(ENTROPY, step, most, EXPLOSION * first, "above", "highest, compared with twice the first")
            )
        left = entropy_left(run)
        if left is not None:
            found.append(left)
    return found + [one for name in ("loss", "grad_norm") if (one := broken(run, name)) is not None]


def _fallen(run: Evidence) -> list[Number]:
    """Returns held-out accuracy and reward if they fell below the limits of `trustrl.runner.run_verdict`."""
    found = []
    lowest, after = lowest_accuracy(run.evaluations), run.verdict["accuracy_after"]
    if lowest is not None and after < lowest:
        what = f"last evaluation, compared with the first minus {STANDARD_ERRORS} standard errors"
        found.append(Number("held-out accuracy", run.evaluations[-1]["step"], after, lowest, "below", what))
    lowest, last = lowest_reward([reward for _, reward in run.rollouts]), run.verdict["reward_last"]
    if lowest is not None and last < lowest:
        count = rollouts_in_a_mean(len(run.rollouts))
        what = f"last {count} rollouts, compared with half of the best {count} or of the first"
        found.append(Number("reward", run.rollouts[-count][0], last, lowest, "below", what))
    return found


def _one_update(run: Evidence) -> Number | None:
    """Returns how far one update moves the policy, or None if that was not measured."""
    seconds = points(run.second_updates(), KL)
    if seconds:
        return _added(run, KL, seconds, KL_OF_ONE_UPDATE, "median of second updates minus median of first updates")
    entropies = points(run.rows, ENTROPY)
    if run.recipe.schedule.updates_per_batch > 1 or len(entropies) <= CHANGES:
        return None
    held = [(step, math.log(max(value, LEAST_ENTROPY))) for step, value in entropies]
    changes = [(after[0], abs(after[1] - before[1])) for before, after in pairwise(held)]
    largest = sorted(changes, key=lambda one: -one[1])[:CHANGES]
    mean = sum(value for _, value in largest) / CHANGES
    return Number("entropy change", min(step for step, _ in largest), mean, ENTROPY_CHANGE, "above", "three largest")


def _grown(run: Evidence, metric: str, limit: float) -> Sequence[Number]:
    """Returns the metric at the end of batches if the updates on a batch moved it beyond its limit."""
    lasts = points(run.last_updates(), metric)
    if not lasts:
        return ()
    found = _added(run, metric, lasts, limit, "median of last updates minus median of first updates")
    return (found,) if found.excess > 0 else ()


def _added(run: Evidence, metric: str, later: Sequence[Point], limit: float, what: str) -> Number:
    """Returns the increase of a metric over a batch's updates.

    If each row covers a batch, the first update is unknown and counts as 0.
    """
    firsts = points(run.first_updates(), metric) if run.updates_per_step == 1 else []
    before = middle(firsts) if firsts else 0.0
    return Number(metric, later[0][0], max(0.0, middle(later) - before), limit, "above", what)
