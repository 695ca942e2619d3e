"""Rules on what there is to learn from: numbers that are none, groups of equal rewards, a policy that only repeats."""

from trustrl.explain.evidence import EQUAL, EQUAL_GROUPS, Evidence, middle, points
from trustrl.explain.findings import Finding, Number, Order, confidence

ENTROPY, DROPPED = "trustrl/entropy", "trustrl/dropped_share"

MEASURES = ("reward", "loss", "grad_norm")
"""Numbers that must be finite. All others below count what was not, and must be 0."""

INPUTS = (
    "reward",
    "frac_reward_nan",  # completions that TRL left out
    "trustrl/fault_advantage",
    "trustrl/fault_behavior",
    "trustrl/fault_proximal",
    "trustrl/fault_support",
    "trustrl/fault_mass",
    "trustrl/fault_column",
    "trustrl/fault_narrow",
)
"""What came to the trainer; anything else that is not finite, the trainer made itself."""

OUTPUTS = ("loss", "grad_norm", "trustrl/fault_policy", "trustrl/fault_overflow")

SOLVED = 0.9
"""A mean reward (of at most 1) from which equal rewards and little entropy mean that the task is done."""

ENTROPY_LEFT = 0.1
"""Share of the first step's entropy below which hardly any completion differs from another."""


def non_finite_values(run: Evidence) -> Finding | None:
    """Rewards, advantages, log-probs or losses that are NaN or infinite: one is enough; it is counted, not guessed."""
    inputs, outputs = (tuple(one for name in names if (one := broken(run, name))) for names in (INPUTS, OUTPUTS))
    if not inputs and not outputs:
        return None
    dropped = [one for one in points(run.rows, DROPPED) if one[1] > 0]
    shares = tuple(Number(DROPPED, step, share, 0.0, "above", "first seen") for step, share in dropped[:1])
    names = ", ".join(one.metric.removeprefix("trustrl/") for one in (*inputs, *outputs))
    where = "They came in with the batch." if inputs else "What came in was finite: the policy itself broke."
    return Finding(
        "non-finite values", Order.INPUT if inputs else Order.STEP, 1.0, f"Not finite: {names}. {where}",
        (*inputs, *outputs, *shares),
        "Look at what makes them: the reward function, a group whose rewards have no spread, the sampler's log-probs. "
        "trustrl.check names the token." if inputs else "See the other findings, the learning rate first.",
    )  # fmt: skip


def no_learning_signal(run: Evidence) -> Finding | None:
    """All rewards of a group are equal, so every advantage is 0: from the start, or later with the task not solved."""
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
    return Finding(
        "no learning signal", Order.SYMPTOM, sure,
        "All rewards in a group are equal " + ("from the start." if from_the_start else "by the end."),
        numbers, "Look at the reward function and at completions; choose problems the model solves now and then.",
    )  # fmt: skip


def entropy_collapse(run: Evidence) -> Finding | None:
    """The policy says nearly the same every time and the task is not solved: it cannot find anything better."""
    left = entropy_left(run)
    if left is None:
        return None
    return Finding(
        "entropy collapse", Order.SYMPTOM, confidence((left,)), "Hardly any completion differs from another any more.",
        (left,), "Raise the region's max_increase, add an entropy bonus, or stop earlier.",
    )  # fmt: skip


def entropy_left(run: Evidence) -> Number | None:
    """The entropy of the last tenth, where it is next to nothing and the task is not solved."""
    entropies = points(run.rows, ENTROPY)
    reward = run.verdict["reward_last"]
    if not entropies or (reward is not None and reward >= SOLVED):
        return None
    last = entropies[-max(1, len(entropies) // 10) :]
    limit = ENTROPY_LEFT * entropies[0][1]
    if middle(last) >= limit:
        return None
    return Number(ENTROPY, last[0][0], middle(last), limit, "below", "median of the last tenth, against the first step")


def broken(run: Evidence, name: str) -> Number | None:
    """The first step at which a value was not finite, or a count of faults above 0."""
    for row in run.rows:
        if name in row and row[name] is None:
            return Number(name, row["step"], None, 0.0, "above", "not finite")
        if name not in MEASURES and row.get(name, 0) > 0:
            return Number(name, row["step"], row[name], 0.0, "above", "first seen")
    return None
