"""Diagnostic rules for the training signal: non-finite values, groups with identical rewards, and entropy collapse."""

from trustrl.tools.explain.causes import Cause, Number, Order, confidence
from trustrl.tools.explain.evidence import EQUAL, EQUAL_GROUPS, Evidence, middle, points

ENTROPY, DROPPED = "trustrl/entropy", "trustrl/dropped_share"

MEASURES = ("reward", "loss", "grad_norm")
"""Metrics that must be finite. All others below count non-finite values and must be 0."""

INPUTS = (
    "reward",
    "frac_reward_nan",  # completions that TRL dropped
    "trustrl/fault_advantage",
    "trustrl/fault_behavior",
    "trustrl/fault_proximal",
    "trustrl/fault_support",
    "trustrl/fault_mass",
    "trustrl/fault_column",
    "trustrl/fault_narrow",
)
"""Inputs of the trainer. The trainer itself produced any other non-finite value."""

OUTPUTS = ("loss", "grad_norm", "trustrl/fault_policy", "trustrl/fault_overflow")

SOLVED = 0.9
"""Mean reward (of at most 1) above which equal rewards and low entropy mean that the task is solved."""

ENTROPY_LEFT = 0.1
"""Share of the first step's entropy below which almost all completions are the same."""


def non_finite_values(run: Evidence) -> Cause | None:
    """Detects NaN or infinite rewards, advantages, log-probs, or losses. One is enough, since faults are counted."""
    inputs, outputs = (tuple(one for name in names if (one := broken(run, name))) for names in (INPUTS, OUTPUTS))
    if not inputs and not outputs:
        return None
    dropped = [one for one in points(run.rows, DROPPED) if one[1] > 0]
    shares = tuple(Number(DROPPED, step, share, 0.0, "above", "first seen") for step, share in dropped[:1])
    names = ", ".join(one.metric.removeprefix("trustrl/") for one in (*inputs, *outputs))
    where = "The inputs contain them." if inputs else "The inputs are finite, so the policy itself diverged."
    return Cause(
        "non-finite values", Order.INPUT if inputs else Order.STEP, 1.0, f"Non-finite values in {names}. {where}",
        (*inputs, *outputs, *shares),
        "Check their sources: the reward function, groups whose rewards have no spread, the sampler's log-probs. "
        "trustrl.check names the token." if inputs else "Check the other causes, starting with the learning rate.",
    )  # fmt: skip


def no_learning_signal(run: Evidence) -> Cause | None:
    """Detects groups with identical rewards, whose advantages are 0, from the start or before the task is solved."""
    shares = points(run.rows, EQUAL)
    if not shares:
        return None
    width = max(1, len(shares) // 10)
    first, last = shares[:width], shares[-max(width, len(shares) // 4) :]
    reward = run.verdict["reward_last"]
    from_the_start = min(shares[0][1], middle(first)) >= EQUAL_GROUPS
    if middle(last) < EQUAL_GROUPS or not (from_the_start or reward is None or reward < SOLVED):
        return None
    numbers = (Number(EQUAL, last[0][0], middle(last), EQUAL_GROUPS, "above", "median of the last quarter"),)
    sure = 1.0 if from_the_start else confidence(numbers)
    return Cause(
        "no learning signal", Order.SYMPTOM, sure,
        "All rewards in a group are equal " + ("from the start." if from_the_start else "by the end."),
        numbers, "Inspect the reward function and the completions, or choose problems that the model solves sometimes.",
    )  # fmt: skip


def entropy_collapse(run: Evidence) -> Cause | None:
    """Detects a policy that repeats itself before the task is solved, so that it no longer explores."""
    left = entropy_left(run)
    if left is None:
        return None
    return Cause(
        "entropy collapse", Order.SYMPTOM, confidence((left,)), "Almost all completions are the same.",
        (left,), "Raise the region's max_increase, add an entropy bonus, or stop earlier.",
    )  # fmt: skip


def entropy_left(run: Evidence) -> Number | None:
    """Returns the entropy of the last tenth of the run if it collapsed before the task was solved, else None."""
    entropies = points(run.rows, ENTROPY)
    reward = run.verdict["reward_last"]
    if not entropies or (reward is not None and reward >= SOLVED):
        return None
    last = entropies[-max(1, len(entropies) // 10) :]
    limit = ENTROPY_LEFT * entropies[0][1]
    if middle(last) >= limit:
        return None
    return Number(
        ENTROPY, last[0][0], middle(last), limit, "below", "median of the last tenth, compared with the first step"
    )


def broken(run: Evidence, name: str) -> Number | None:
    """Returns the first step with a non-finite value or a positive fault count, or None."""
    for row in run.rows:
        if name in row and row[name] is None:
            return Number(name, row["step"], None, 0.0, "above", "not finite")
        if name not in MEASURES and row.get(name, 0) > 0:
            return Number(name, row["step"], row[name], 0.0, "above", "first seen")
    return None
