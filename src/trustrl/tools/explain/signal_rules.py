"""Diagnostic rules for the training signal: non-finite values, cut completions, equal rewards, and entropy.

Rules for the distance of updates also ask for signs that the run was harmed: `harms`.
"""

import math
from typing import Literal

from trustrl.runs.metric_names import AT_LIMIT, CUT, LONGEST
from trustrl.runs.run_verdict import STANDARD_ERRORS, lowest_accuracy, lowest_reward, rollouts_in_a_mean
from trustrl.tools.explain.causes import ACCURACY, Cause, Number, Order, confidence
from trustrl.tools.explain.changes import longer_completions, lower_learning_rate, wider_region
from trustrl.tools.explain.evidence import (
    ENTROPY,
    EQUAL,
    EQUAL_GROUPS,
    GRADIENT,
    LOSS,
    MASKED,
    REWARD,
    UNSCORED,
    Evidence,
    first_and_last,
    middle,
    onset,
    points,
)

DROPPED = "trustrl/dropped_share"

INPUTS = (
    REWARD,
    UNSCORED,  # completions that TRL dropped
    "trustrl/fault_advantage",
    "trustrl/fault_behavior",
    "trustrl/fault_proximal",
    "trustrl/fault_support",
    "trustrl/fault_mass",
    "trustrl/fault_column",
    "trustrl/fault_narrow",
)
"""Inputs of the trainer. The trainer itself produced any other non-finite value."""

OUTPUTS = (LOSS, GRADIENT, "trustrl/fault_policy", "trustrl/fault_overflow")

NO_GRADIENT = 1e-8
"""Largest gradient norm of a batch without a learning signal."""

MOSTLY_MASKED = 0.5
"""Share of masked tokens from which a missing gradient may be the region's work."""

MOSTLY_CUT = 0.5
"""Share of completions that reach the length limit without an end, from which most rewards judge a fragment."""

SELDOM_REWARDED = 0.05
"""Mean reward (of at most 1) below which the length limit may be the reason that nothing is rewarded."""

SHOWN = 60
"""Characters of a completion in a reason."""

LONG = 32
"""Tokens of the longest response from which a response as long as the limit was probably cut there."""

SOLVED = 0.9
"""Mean reward (of at most 1) above which equal rewards and low entropy mean that the task is solved."""

ENTROPIES = {"below": (0.1, "a tenth of"), "above": (2.0, "twice")}
"""Multiples of the first batches' entropy. Below the one, almost all completions are the same; above the other, entropy
has exploded."""

MEASURES = (REWARD, LOSS, GRADIENT)
"""Metrics that must be finite. All others that `broken` is asked for count non-finite values and must be 0."""


def non_finite_values(run: Evidence) -> Cause | None:
    """Detects NaN or infinite rewards, advantages, log-probs, or losses. One is enough, since faults are counted."""
    inputs, outputs = (tuple(number for name in names if (number := broken(run, name))) for names in (INPUTS, OUTPUTS))
    if not inputs and not outputs:
        return None
    dropped = [point for point in points(run.rows, DROPPED) if point[1] > 0]
    shares = tuple(Number(DROPPED, step, share, 0.0, "above", "first seen") for step, share in dropped[:1])
    names = ", ".join(number.metric.removeprefix("trustrl/") for number in (*inputs, *outputs))
    where = "The inputs contain them." if inputs else "The inputs are finite, so the policy itself diverged."
    return Cause(
        "non-finite values", Order.INPUT if inputs else Order.STEP, 1.0, f"Non-finite values in {names}. {where}",
        (*inputs, *outputs, *shares),
        "Check their sources: the reward function, groups whose rewards have no spread, the sampler's log-probs. "
        "trustrl.check names the token." if inputs else "Check the other causes, starting with the learning rate.",
    )  # fmt: skip


def completions_cut_off(run: Evidence) -> Cause | None:
    """Detects a length limit that cuts most completions from the start, in a run that is almost never rewarded.

    verl's metric counts responses as long as the limit, which includes those that ended there. It counts only if
    responses are long, since short ones often have the same length.
    """
    metric, shares = CUT, run.per_batch(CUT)
    if not shares:
        metric, longest = AT_LIMIT, run.per_batch(LONGEST)
        shares = run.per_batch(AT_LIMIT) if longest and middle(longest) >= LONG else []
    sides, rewards = first_and_last(shares, 4), run.mean_rewards
    if sides is None or not rewards or max(rewards) > SELDOM_REWARDED:
        return None
    first, last = sides
    if min(middle(first), middle(last)) < MOSTLY_CUT:
        return None
    numbers = (
        Number(metric, first[0][0], middle(first), MOSTLY_CUT, "above", f"median of the first {len(first)} batches"),
        Number(REWARD, first[0][0], max(rewards), SELDOM_REWARDED, "below", "best mean over several batches"),
    )
    return Cause(
        "completions cut off", Order.INPUT, confidence(numbers),
        "Most completions reach the length limit without an end from the start, and almost none is rewarded.",
        numbers, "Raise the limit on completion length, or make the prompt ask for shorter answers.",
        longer_completions(run.run, _longest(run)), "truncated",
    )  # fmt: skip


def _longest(run: Evidence) -> float | None:
    lengths = run.per_batch(LONGEST) or run.per_batch("completions/max_length")
    return max((length for _, length in lengths), default=None)


def no_learning_signal(run: Evidence) -> Cause | None:
    """Detects groups with identical rewards, whose advantages are 0, from the start or before the task is solved.

    If the trainer does not log their share, a gradient of 0 shows it, unless the region masks most tokens.
    """
    metric, shares, limit = EQUAL, run.per_batch(EQUAL), EQUAL_GROUPS
    if not shares:
        metric, shares, limit = GRADIENT, run.per_batch(GRADIENT), NO_GRADIENT
        masked = run.per_batch(MASKED)
        if masked and middle(masked) >= MOSTLY_MASKED:
            return None
    sides = first_and_last(shares, 4)
    if sides is None:
        return None
    above = metric == EQUAL
    dead = [middle(side) >= limit if above else middle(side) <= limit for side in sides]
    from_the_start = dead[0] and (shares[0][1] >= limit if above else shares[0][1] <= limit)
    if not dead[1] or not (from_the_start or not _is_solved(run)):
        return None
    last = sides[1]
    what = f"median of the last {len(last)} batches"
    side: Literal["above", "below"] = "above" if above else "below"
    # EQUAL_GROUPS and NO_GRADIENT belong to the range of a batch without a signal.
    edge = limit - 1e-9 if above else 2 * limit
    numbers = (Number(metric, onset(shares, edge, side), middle(last), limit, side, what),)
    why = "All rewards in a group are equal" if above else "The gradient is 0, as if all rewards in a group were equal,"
    return Cause(
        "no learning signal", Order.SYMPTOM, 1.0 if from_the_start else confidence(numbers),
        f"{why} {'from the start' if from_the_start else 'by the end'}.",
        numbers, "Inspect the reward function and the completions, or choose problems that the model solves sometimes.",
    )  # fmt: skip


def entropy_collapse(run: Evidence) -> Cause | None:
    """Detects a policy that repeats itself before the task is solved, so that it no longer explores."""
    left = changed_entropy(run, "below")
    if left is None:
        return None
    return Cause(
        "entropy collapse", Order.SYMPTOM, confidence((left,)), f"Almost all completions are the same.{_common(run)}",
        (left,), "Raise the region's max_increase, add an entropy bonus, or stop earlier.", wider_region(run.run),
    )  # fmt: skip


def _common(run: Evidence) -> str:
    """Returns a sentence with the most frequent completion of the last step; empty without texts."""
    last = run.sampled[-1] if run.sampled else None
    if last is None or last.common is None:
        return ""
    text, share = last.common
    return f" At step {last.step}, {share:.0%} of {last.completions} are {text[:SHOWN]!r}."


def entropy_explosion(run: Evidence) -> Cause | None:
    """Detects a policy whose entropy has more than doubled, unless the held-out accuracy rose all the same."""
    rise = changed_entropy(run, "above")
    if rise is None or has_learnt(run):
        return None
    return Cause(
        "entropy explosion", Order.SYMPTOM, confidence((rise,)), "Completions become noise.",
        (rise,), "Lower the learning rate and any entropy bonus, and compare sampler and trainer with `trustrl probe`.",
        lower_learning_rate(run.run),
    )  # fmt: skip


def harms(run: Evidence) -> list[Number]:
    """Returns the signs that a run was harmed. The list is empty if it went well, as far as the files show.

    The held-out accuracy decides if the first one is high enough for a fall to show. Otherwise the reward does, over
    several batches.
    """
    signs = [sign for name in (LOSS, GRADIENT) if (sign := broken(run, name)) is not None]
    if has_learnt(run):
        return signs
    lowest = lowest_accuracy(run.evaluations)
    fallen = _fallen_reward(run) if lowest is None or lowest <= 0 else _fallen_accuracy(run, lowest)
    entropies = (changed_entropy(run, "above"), changed_entropy(run, "below"))
    return [sign for sign in (fallen, *entropies) if sign is not None] + signs


def fell(run: Evidence) -> bool:
    """Returns whether the held-out accuracy or the reward fell."""
    return any(sign.metric in (ACCURACY, REWARD) for sign in harms(run))


def has_learnt(run: Evidence) -> bool:
    """Returns whether the held-out accuracy rose by more than its standard errors."""
    lowest = lowest_accuracy(run.evaluations)
    if lowest is None:
        return False
    first, last = run.evaluations[0]["accuracy"], run.evaluations[-1]["accuracy"]
    return last > 2 * first - lowest


def _fallen_accuracy(run: Evidence, lowest: float) -> Number | None:
    last = run.evaluations[-1]
    what = f"last evaluation, compared with the first minus {STANDARD_ERRORS} standard errors"
    below = last["accuracy"] < lowest
    return Number(ACCURACY, last["step"], last["accuracy"], lowest, "below", what) if below else None


def _fallen_reward(run: Evidence) -> Number | None:
    """Returns the reward of the last batches if it is below half of the best or of the first batch's."""
    rewards = run.per_batch(REWARD)
    lowest = lowest_reward([reward for _, reward in rewards])
    if lowest is None or not run.mean_rewards or run.mean_rewards[-1] >= lowest:
        return None
    count = rollouts_in_a_mean(len(rewards))
    what = f"last {count} batches, compared with half of the best {count} or of the first"
    best = max(range(len(rewards)), key=lambda batch: rewards[batch][1])
    step = onset(rewards[best:], lowest, "below")
    return Number(REWARD, step, run.mean_rewards[-1], lowest, "below", what)


def changed_entropy(run: Evidence, side: Literal["above", "below"]) -> Number | None:
    """Returns the entropy of the last batches if it collapsed or exploded before the task was solved, else None."""
    entropies = run.per_batch(ENTROPY)
    sides = first_and_last(entropies, 10)
    if sides is None or _is_solved(run):
        return None
    first, last = sides
    factor, words = ENTROPIES[side]
    limit, value = factor * middle(first), middle(last)
    if not (value > limit if side == "above" else value < limit):
        return None
    what = f"median of the last {len(last)} batches, compared with {words} the first {len(first)}"
    return Number(ENTROPY, onset(entropies, limit, side), value, limit, side, what)


def _is_solved(run: Evidence) -> bool:
    return bool(run.mean_rewards) and run.mean_rewards[-1] >= SOLVED


def broken(run: Evidence, name: str) -> Number | None:
    """Returns the first step with a non-finite value or a positive fault count, or None."""
    for row in run.rows:
        value = row.get(name, 0.0)
        if value is None or not math.isfinite(value):
            return Number(name, row["step"], None, 0.0, "above", "not finite")
        if name not in MEASURES and value > 0:
            return Number(name, row["step"], value, 0.0, "above", "first seen")
    return None
