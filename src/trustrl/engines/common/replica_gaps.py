"""Rule that finds replicas of a sampler that do not follow the trainer, from each replica's gap at every step.

The gap of a replica is its mean |log π' − log μ| over the tokens that it sampled with the trainer's current weights.
Imports neither torch nor an engine: engines apply the rule while they train, and `trustrl explain` to records.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

FEWEST_TOKENS = 64
"""Tokens below which a replica's gap at a step is not judged."""

SMALLEST_GAP = 1e-3
"""Gap in nats below which nothing is reported: two implementations in float32 differ by less."""

RATIO, EARLY_RATIO = 1.5, 3.0
"""Smallest multiple of the others' gap that counts, and the one before the run's own scatter is known."""

GROWTH = 5.0
"""Smallest multiple of a replica's own usual gap that counts, for a replica without others or for all at once."""

SCATTERS = 8.0
"""Multiple of the usual scatter that counts. Gaussian scatter exceeds it once in 1e15 steps, Laplacian in 7,000."""

WINDOW = 32
"""Number of earlier steps that define what is usual."""

FEWEST_STEPS, FEWEST_SCATTERS = 8, 16
"""Earlier steps of a replica before its own history counts, and values before the scatter does."""


@dataclass(frozen=True, slots=True)
class StaleReplica:
    """A replica that stands out at one step."""

    name: str
    gap: float
    """Mean |log π' − log μ| in nats."""

    tokens: int
    usual: float
    """The gap that was expected of it."""

    against: str
    """Source of that expectation: "the other replicas" or "its own earlier steps"."""


class ReplicaGaps:
    """History of the gaps, and the rule.

    A replica's gap is compared with the median of the others at the same step, times its usual multiple of theirs, and
    with its own median. The limit is a multiple of the scatter that the run itself showed. Steps with a stale replica
    do not enter the history.
    """

    def __init__(self) -> None:
        self._relative = _History()
        self._own = _History()

    def stale(self, gaps: Mapping[str, tuple[float, int]]) -> list[StaleReplica]:
        """Returns the replicas that stand out at this step, and adds the step to the history if none does.

        Args:
            gaps: For each replica the mean |log π' − log μ| and the number of tokens behind it.
        """
        known = {name: gap for name, (gap, tokens) in gaps.items() if tokens >= FEWEST_TOKENS}
        # A gap of exactly 0, as with the trainer's own model as the sampler, has no logarithm.
        logs = {name: math.log(max(gap, 1e-12)) for name, gap in known.items()}
        relative = {
            name: value - median(other for rival, other in logs.items() if rival != name)
            for name, value in logs.items()
            if len(logs) > 1
        }
        stale = []
        for name, gap in known.items():
            if gap < SMALLEST_GAP:
                continue
            tokens = gaps[name][1]
            if name in relative:
                excess = self._relative.excess(name, relative[name])
                if excess > self._relative.limit(RATIO, EARLY_RATIO):
                    usual = gap * math.exp(-excess)
                    stale.append(StaleReplica(name, gap, tokens, usual, "the other replicas"))
                    continue
            if self._own.knows(name):
                rise = self._own.excess(name, logs[name])
                if rise > self._own.limit(GROWTH, GROWTH):
                    stale.append(StaleReplica(name, gap, tokens, gap * math.exp(-rise), "its own earlier steps"))
        if not stale:
            self._relative.add(relative)
            self._own.add(logs)
        return stale


class _History:
    """Earlier values of each replica, and their scatter over all replicas."""

    def __init__(self) -> None:
        self._values: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._scatter: deque[float] = deque(maxlen=WINDOW * WINDOW)

    def knows(self, name: str) -> bool:
        """Returns whether a replica has enough earlier values."""
        return len(self._values[name]) >= FEWEST_STEPS

    def excess(self, name: str, value: float) -> float:
        """Returns the distance of a value from the replica's usual one, which is 0 if it has no history."""
        return value - (median(self._values[name]) if self.knows(name) else 0.0)

    def limit(self, ratio: float, early: float) -> float:
        """Returns the largest ordinary excess: the logarithm of a ratio, or a multiple of the scatter."""
        if len(self._scatter) < FEWEST_SCATTERS:
            return math.log(early)
        return max(math.log(ratio), SCATTERS * 1.4826 * median(self._scatter))

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        for name, value in values.items():
            if self.knows(name):
                self._scatter.append(abs(self.excess(name, value)))
            self._values[name].append(value)
