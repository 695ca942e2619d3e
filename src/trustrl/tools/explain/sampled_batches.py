"""Facts about the completions of each step, read once for all rules."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from trustrl.runs.run import Completion, Run

MOST_COMPLETIONS = 50_000
"""Completions to read. Later ones are left out."""


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Facts about the completions of one step."""

    step: int
    completions: int
    unscored: int
    """Completions for which no reward function gave a finite number."""

    repeated: float
    """Share of the groups whose prompt another group has."""

    common: tuple[str, float] | None
    """Most frequent text and its share. None without texts."""


def sampled_batches(run: Run) -> list[SampledBatch]:
    """Returns the facts of each step. Empty if the run has no completions.

    Raises:
        RecordError: If a file cannot be read.
    """
    steps: dict[int, list[Completion]] = defaultdict(list)
    for completion in islice(run.completions(), MOST_COMPLETIONS):
        steps[completion.step].append(completion)
    return [_facts(step, completions) for step, completions in sorted(steps.items())]


def _facts(step: int, completions: Sequence[Completion]) -> SampledBatch:
    unscored = sum(x.reward is None and all(value is None for value in x.rewards.values()) for x in completions)
    prompts = {x.group: x.prompt for x in completions if x.group is not None and x.prompt is not None}
    counts = Counter(prompts.values())
    repeated = sum(count for count in counts.values() if count > 1) / len(prompts) if prompts else 0.0
    texts = Counter(x.text for x in completions if x.text is not None).most_common(1)
    common = (texts[0][0], texts[0][1] / len(completions)) if texts else None
    return SampledBatch(step, len(completions), unscored, repeated, common)
