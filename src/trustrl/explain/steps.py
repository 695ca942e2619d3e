"""Rules on how far the policy moves: by one update, and by all updates on one batch.

Moving far is only a cause where the run took harm, so these rules ask for both, except where a region stops so much
that the batch is used up.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from trustrl.explain.evidence import Evidence, Point, middle, points
from trustrl.explain.findings import Finding, Number, Order, confidence
from trustrl.explain.signal import broken, entropy_left
from trustrl.runner.summary import STANDARD_ERRORS, lowest_accuracy, lowest_reward, rollouts_in_a_mean

KL, MASKED, ENTROPY = "trustrl/kl_k3", "trustrl/masked_share", "trustrl/entropy"

KL_OF_ONE_UPDATE = 0.02
"""KL in nats that one step of the optimiser adds: twice what the metric dictionary calls healthy for a whole batch."""

ENTROPY_CHANGE = 0.5
"""|log(H after / H before)| of one update: more than a factor of 1.6. In 40 healthy runs it was .09 to .28."""

CHANGES = 3
"""So many of the largest changes are averaged, so that one odd batch is not enough."""

EXPLOSION = 2.0
"""Entropy has exploded at this multiple of the first step's."""

KL_OF_A_BATCH = 0.05
"""KL in nats that the updates on a batch add: five times what the metric dictionary calls healthy."""

MASKED_OF_A_BATCH = 0.1
"""Share of tokens stopped at a batch's end beyond its first update; the dictionary's band ends at a few per cent."""

LEAST_ENTROPY = 1e-3
"""Entropies below it are taken as it: their ratios mean nothing."""


def learning_rate_too_large(run: Evidence) -> Finding | None:
    """One update moves the policy too far, and reward or entropy broke.

    How far is the KL at a batch's second update, less that at the first, where only a mismatch shows. Where batches
    have one update only, it is the change of entropy from one step to the next: nothing else is measured after it.
    """
    harm = harms(run)
    moved = _one_update(run)
    if moved is None or moved.excess <= 0 or not harm:
        return None
    numbers = (moved, *harm)
    return Finding(
        "learning rate too large", Order.STEP, confidence(numbers), "One update moves the policy far, and it broke.",
        numbers, f"Lower optimiser.learning_rate (now {run.recipe.optimiser.learning_rate:g}) by a factor of 3 to 10.",
    )  # fmt: skip


def too_many_updates(run: Evidence) -> Finding | None:
    """Single updates are small, but those on one batch add up to more than the region holds.

    Either the region stops a large share of tokens at the batch's end, or the policy is far away by then and the reward
    fell.
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
    return Finding(
        "too many updates per batch", Order.STEP, confidence(numbers),
        f"Each of {updates} updates is small; together they carry the policy out of its region.",
        tuple(numbers), f"Lower schedule.updates_per_batch (now {updates}), or choose a region that holds the policy.",
    )  # fmt: skip


def harms(run: Evidence) -> list[Number]:
    """Returns what broke: held-out accuracy, reward, entropy either way, or a value that is not finite."""
    found = _fallen(run)
    entropies = points(run.rows, ENTROPY)
    if entropies:
        first = entropies[0][1]
        step, most = max(entropies, key=lambda one: one[1])
        if most > EXPLOSION * first:
            found.append(Number(ENTROPY, step, most, EXPLOSION * first, "above", "highest, against twice the first"))
        left = entropy_left(run)
        if left is not None:
            found.append(left)
    return found + [one for name in ("loss", "grad_norm") if (one := broken(run, name)) is not None]


def _fallen(run: Evidence) -> list[Number]:
    """Returns the held-out accuracy and the reward where they fell, by the limits of `trustrl.runner.summary`."""
    found = []
    lowest, after = lowest_accuracy(run.evaluations), run.verdict["accuracy_after"]
    if lowest is not None and after < lowest:
        what = f"last evaluation, against the first less {STANDARD_ERRORS} standard errors"
        found.append(Number("held-out accuracy", run.evaluations[-1]["step"], after, lowest, "below", what))
    lowest, last = lowest_reward([reward for _, reward in run.rollouts]), run.verdict["reward_last"]
    if lowest is not None and last < lowest:
        count = rollouts_in_a_mean(len(run.rollouts))
        what = f"last {count} rollouts, against half of the best {count} or of the first"
        found.append(Number("reward", run.rollouts[-count][0], last, lowest, "below", what))
    return found


def _one_update(run: Evidence) -> Number | None:
    """How far one update moves the policy."""
    seconds = points(run.second_updates(), KL)
    if seconds:
        return _added(run, KL, seconds, KL_OF_ONE_UPDATE, "median of second updates, less that of first ones")
    entropies = points(run.rows, ENTROPY)
    if run.recipe.schedule.updates_per_batch > 1 or len(entropies) <= CHANGES:
        return None
    held = [(step, math.log(max(value, LEAST_ENTROPY))) for step, value in entropies]
    changes = [(after[0], abs(after[1] - before[1])) for before, after in pairwise(held)]
    largest = sorted(changes, key=lambda one: -one[1])[:CHANGES]
    mean = sum(value for _, value in largest) / CHANGES
    return Number("entropy change", min(step for step, _ in largest), mean, ENTROPY_CHANGE, "above", "three largest")


def _grown(run: Evidence, metric: str, limit: float) -> Sequence[Number]:
    """The metric at batches' ends, where the batch's own updates carried it beyond its limit."""
    lasts = points(run.last_updates(), metric)
    if not lasts:
        return ()
    found = _added(run, metric, lasts, limit, "median of last updates, less that of first ones")
    return (found,) if found.excess > 0 else ()


def _added(run: Evidence, metric: str, later: Sequence[Point], limit: float, what: str) -> Number:
    """What a batch's updates added to a metric; where rows sum up a batch, the first update cannot be told from it."""
    firsts = points(run.first_updates(), metric) if run.updates_per_step == 1 else []
    before = middle(firsts) if firsts else 0.0
    return Number(metric, later[0][0], max(0.0, middle(later) - before), limit, "above", what)
