"""Diagnostic rules on completions and their lengths, and on a reward that held-out problems contradict."""

from trustrl.runs.run_verdict import FEWEST_ROLLOUTS, lowest_accuracy
from trustrl.tools.explain.causes import ACCURACY, Cause, Number, Order, confidence
from trustrl.tools.explain.evidence import REWARD, UNSCORED, Evidence, first_and_last, middle, onset, points

LENGTH = "completion_length"
WITHOUT_REWARD = "completions without a reward"
REPEATED = "prompts that are repeated in a batch"

SHORTER, LONGER = 0.2, 2.0
"""Factors on the length of the first batches: a collapse below the one, growth that counts above the other."""

MOSTLY_REPEATED = 0.5
"""Share of a batch's prompts that another group of the batch has too."""

RISE = 0.1
"""Smallest rise of the mean reward that counts, as a share of the first."""


def lost_rewards(run: Evidence) -> Cause | None:
    """Detects completions without any reward among others that have one. Stock TRL counts them as 0 without a word."""
    batches = run.sampled
    lost = [batch for batch in batches if batch.unscored]
    if any(value > 0 for _, value in points(run.rows, UNSCORED)) or not lost:
        return None
    if all(batch.unscored == batch.completions for batch in batches):  # rewards were not stored
        return None
    first = lost[0]
    what = f"{first.unscored} of {first.completions} at this step, and some at {len(lost)} of {len(batches)} steps"
    share = first.unscored / first.completions
    numbers = (Number(WITHOUT_REWARD, first.step, share, 0.0, "above", what, file="completions"),)
    return Cause(
        "lost rewards", Order.INPUT, confidence(numbers),
        "The reward function gave no finite number for some completions, and the trainer went on without it.",
        numbers, "Make the reward function return a number for every completion: look for NaN, None and time limits.",
    )  # fmt: skip


def duplicated_data(run: Evidence) -> Cause | None:
    """Detects batches in which most prompts occur in several groups."""
    series = [(batch.step, batch.repeated) for batch in run.sampled]
    if len(series) < FEWEST_ROLLOUTS or middle(series) <= MOSTLY_REPEATED:
        return None
    step = onset(series, MOSTLY_REPEATED, "above")
    what = f"median share over {len(series)} batches"
    numbers = (Number(REPEATED, step, middle(series), MOSTLY_REPEATED, "above", what, file="completions"),)
    return Cause(
        "duplicated data", Order.INPUT, confidence(numbers),
        "Most prompts of a batch occur in several of its groups, so that a batch has few different problems.",
        numbers, "Remove duplicates from the data set, and check that each rank draws other problems.",
    )  # fmt: skip


def length_collapse(run: Evidence) -> Cause | None:
    """Detects completions that shrink to a fifth of their length while the reward does not rise."""
    lengths, rewards = run.per_batch(LENGTH), run.mean_rewards
    sides = first_and_last(lengths, 10)
    if sides is None or not rewards or rewards[-1] > rewards[0]:
        return None
    limit, last = SHORTER * middle(sides[0]), middle(sides[1])
    if last >= limit:
        return None
    what = f"median of the last {len(sides[1])} batches, compared with a fifth of the first {len(sides[0])}"
    numbers = (Number(LENGTH, onset(lengths, limit, "below"), last, limit, "below", what),)
    return Cause(
        "length collapse", Order.SYMPTOM, confidence(numbers),
        "Completions shrink to a fraction of their length, and the reward does not rise.",
        numbers, "Read the completions. Look for a penalty on length, and for an end token that is rewarded by itself.",
    )  # fmt: skip


def length_hacking(run: Evidence) -> Cause | None:
    """Detects completions that grow with the reward, in a run whose held-out accuracy fell."""
    gap, sides = _contradiction(run), first_and_last(run.per_batch(LENGTH), 10)
    if gap is None or sides is None or middle(sides[1]) <= LONGER * middle(sides[0]):
        return None
    limit = LONGER * middle(sides[0])
    what = f"median of the last {len(sides[1])} batches, compared with twice the first {len(sides[0])}"
    longer = Number(LENGTH, onset(run.per_batch(LENGTH), limit, "above"), middle(sides[1]), limit, "above", what)
    return Cause(
        "length hacking", Order.INPUT, confidence((longer, *gap)),
        "Completions grow and are rewarded for it, while held-out accuracy falls.",
        (longer, *gap), "Remove what rewards length, or normalize the reward by it.", read_by="best",
    )  # fmt: skip


def reward_hacking(run: Evidence) -> Cause | None:
    """Detects a reward that rises while held-out accuracy falls, unless growing completions explain it."""
    gap = _contradiction(run)
    if gap is None or length_hacking(run) is not None:
        return None
    return Cause(
        "reward contradicts held-out accuracy", Order.SYMPTOM, confidence(gap),
        "The reward rises while held-out accuracy falls: the policy learns something that the reward likes.",
        gap, "Read the completions with the highest reward, and make the reward function refuse what they do.",
        read_by="best",
    )  # fmt: skip


def _contradiction(run: Evidence) -> tuple[Number, Number] | None:
    """Returns the risen reward and the fallen accuracy, if there are both."""
    lowest, rewards = lowest_accuracy(run.evaluations), run.mean_rewards
    if lowest is None or not rewards or run.evaluations[-1]["accuracy"] >= lowest:
        return None
    limit = rewards[0] + RISE * abs(rewards[0])
    if rewards[-1] <= limit or rewards[-1] <= rewards[0]:
        return None
    series, last = run.per_batch(REWARD), run.evaluations[-1]
    risen = Number(
        REWARD, onset(series, limit, "above"), rewards[-1], limit, "above", "last batches, and the first mean"
    )
    what = "last evaluation, compared with the first minus 2 standard errors"
    return risen, Number(ACCURACY, last["step"], last["accuracy"], lowest, "below", what)
