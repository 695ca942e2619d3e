"""Signs that a run was harmed: held-out accuracy, reward, entropy, or a loss that is not finite.

The held-out accuracy decides where it can. Otherwise the reward does, over several batches.
"""

import math
from typing import Literal

from trustrl.runs.run_verdict import STANDARD_ERRORS, lowest_accuracy, lowest_reward, rollouts_in_a_mean
from trustrl.tools.explain.causes import Number
from trustrl.tools.explain.evidence import Evidence, first_and_last, middle
from trustrl.tools.explain.metric_sources import ENTROPY, GRADIENT, LOSS, REWARD

SOLVED = 0.9
"""Mean reward (of at most 1) above which equal rewards and low entropy mean that the task is solved."""

ENTROPY_LEFT = 0.1
"""Share of the first batches' entropy below which almost all completions are the same."""

EXPLOSION = 2.0
"""Multiple of the first batches' entropy at which entropy has exploded."""

MEASURES = (REWARD, LOSS, GRADIENT)
"""Metrics that must be finite. All others that `broken` is asked for count non-finite values and must be 0."""


def harms(run: Evidence) -> list[Number]:
    """Returns the signs of harm. The list is empty if the run went well, as far as the files show."""
    signs = [sign for name in (LOSS, GRADIENT) if (sign := broken(run, name)) is not None]
    if has_learnt(run):
        return signs
    fallen = fallen_accuracy(run) if accuracy_decides(run) else fallen_reward(run)
    return [sign for sign in (fallen, entropy_rise(run), entropy_left(run)) if sign is not None] + signs


def accuracy_decides(run: Evidence) -> bool:
    """Returns whether the first held-out accuracy is high enough that a fall would show."""
    lowest = lowest_accuracy(run.evaluations)
    return lowest is not None and lowest > 0


def has_learnt(run: Evidence) -> bool:
    """Returns whether the held-out accuracy rose by more than its standard errors."""
    if len(run.evaluations) < 2:
        return False
    lowest = lowest_accuracy(run.evaluations)
    first, last = run.evaluations[0]["accuracy"], run.evaluations[-1]["accuracy"]
    return lowest is not None and last > 2 * first - lowest


def fallen_accuracy(run: Evidence) -> Number | None:
    """Returns the last held-out accuracy if it is below the first by more than the standard errors."""
    lowest = lowest_accuracy(run.evaluations)
    if lowest is None or run.evaluations[-1]["accuracy"] >= lowest:
        return None
    last = run.evaluations[-1]
    what = f"last evaluation, compared with the first minus {STANDARD_ERRORS} standard errors"
    return Number("held-out accuracy", last["step"], last["accuracy"], lowest, "below", what)


def fallen_reward(run: Evidence) -> Number | None:
    """Returns the reward of the last batches if it is below half of the best or of the first batch's."""
    lowest, last = lowest_reward(run.rewards), run.last_reward
    if lowest is None or last is None or last >= lowest:
        return None
    count = rollouts_in_a_mean(len(run.rewards))
    what = f"last {count} batches, compared with half of the best {count} or of the first"
    return Number(REWARD, run.per_batch(REWARD)[-count][0], last, lowest, "below", what)


def entropy_left(run: Evidence) -> Number | None:
    """Returns the entropy of the last batches if it collapsed before the task was solved, else None."""
    return _changed_entropy(run, ENTROPY_LEFT, "below", "a tenth of")


def entropy_rise(run: Evidence) -> Number | None:
    """Returns the entropy of the last batches if it is above twice that of the first ones, else None."""
    return _changed_entropy(run, EXPLOSION, "above", "twice")


def _changed_entropy(run: Evidence, factor: float, side: Literal["above", "below"], words: str) -> Number | None:
    """Returns the entropy of the last batches if it is beyond this multiple of the first ones, else None."""
    sides = first_and_last(run.per_batch(ENTROPY), 10)
    if sides is None or is_solved(run):
        return None
    first, last = sides
    limit, value = factor * middle(first), middle(last)
    if not (value > limit if side == "above" else value < limit):
        return None
    what = f"median of the last {len(last)} batches, compared with {words} the first {len(first)}"
    return Number(ENTROPY, last[0][0], value, limit, side, what)


def is_solved(run: Evidence) -> bool:
    """Returns whether the last batches have nearly all of the reward."""
    return run.last_reward is not None and run.last_reward >= SOLVED


def broken(run: Evidence, name: str) -> Number | None:
    """Returns the first step with a non-finite value or a positive fault count, or None."""
    for row in run.rows:
        value = row.get(name, 0.0)
        if value is None or not math.isfinite(value):
            return Number(name, row["step"], None, 0.0, "above", "not finite")
        if name not in MEASURES and value > 0:
            return Number(name, row["step"], value, 0.0, "above", "first seen")
    return None
