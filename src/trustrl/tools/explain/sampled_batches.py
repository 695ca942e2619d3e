"""Facts about the completions of each step, read once for all rules."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from trustrl.runs.first_completions import MOST_COMPLETIONS
from trustrl.runs.run import Completion, Run


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Facts about the completions of one step."""

    step: int
    completions: int
    unscored: int
    """Completions for which no reward function gave a finite number."""

    prompts: int | None
    """Hash of the prompts with their counts, in no order, for comparisons within a process. None without prompts."""

    repeated: float
    """Share of the groups whose prompt another group has."""

    common: tuple[str, float] | None
    """Most frequent text and its share. None without texts."""


def sampled_batches(run: Run) -> list[SampledBatch]:
    """Returns the facts of each step. Empty if the run has no completions.

    Raises:
        RecordError: If a file cannot be read.
    """
    steps = groupby(islice(run.completions(), MOST_COMPLETIONS), key=lambda completion: completion.step)
    return [_facts(step, list(completions)) for step, completions in steps]  # only one step in memory


def _facts(step: int, completions: Sequence[Completion]) -> SampledBatch:
    unscored = sum(x.reward is None and all(value is None for value in x.rewards.values()) for x in completions)
    prompts = {x.group: x.prompt for x in completions if x.group is not None and x.prompt is not None}
    counts = Counter(prompts.values())
    asked = Counter(x.prompt for x in completions if x.prompt is not None)
    repeated = sum(count for count in counts.values() if count > 1) / len(prompts) if prompts else 0.0
    texts = Counter(x.text for x in completions if x.text is not None).most_common(1)
    common = (texts[0][0], texts[0][1] / len(completions)) if texts else None
    return SampledBatch(
        step=step, completions=len(completions), unscored=unscored, repeated=repeated, common=common,
        prompts=hash(frozenset(asked.items())) if asked else None,
    )  # fmt: skip
