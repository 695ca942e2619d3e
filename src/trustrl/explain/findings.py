"""What a rule says: a cause, the numbers behind it, how sure it is, and what to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from trustrl.metrics import METRICS

HEALTHY = {f"trustrl/{metric.name}": metric.healthy for metric in METRICS} | {
    "loss": "finite",
    "grad_norm": "finite",
    "reward": "rises, or stays near its best",
    "held-out accuracy": "rises",
    "entropy change": "below .3 for the three largest",
    "frac_reward_zero_std": "below .5",
    "frac_reward_nan": "0",
}
"""Of each number a finding may name: the metric dictionary's band, and words for what engines log themselves."""


class Order(IntEnum):
    """What can cause what: an earlier one may bring about a later one, never the other way round."""

    INPUT = 0
    """What came in was not a number."""

    SAMPLER = 1
    """What sampled is not what the trainer thinks."""

    STEP = 2
    """The policy moves too far."""

    SYMPTOM = 3
    """Nothing can be learnt any more."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number that speaks for a cause, beside the limit it has left."""

    metric: str
    step: int
    """The first step it is read at."""

    value: float | None
    """None where it was not finite."""

    limit: float
    side: Literal["above", "below"]
    what: str
    """Over which steps it was taken."""

    @property
    def healthy(self) -> str:
        """Where it lies in a healthy run."""
        return HEALTHY.get(self.metric, "none: depends on the task")

    @property
    def excess(self) -> float:
        """How far it is beyond its limit: 0 at the limit, .5 at twice (or half) of it, 1 far away or not finite."""
        if self.value is None:
            return 1.0
        near, far = (self.limit, self.value) if self.side == "above" else (self.value, self.limit)
        return 0.0 if far <= 0 else min(1.0, max(0.0, 1 - near / far))


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause."""

    name: str
    order: Order
    confidence: float
    """See `confidence`; a score to compare findings with, not a probability."""

    reason: str
    numbers: tuple[Number, ...]
    action: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        numbers = [asdict(one) | {"healthy": one.healthy} for one in self.numbers]
        return {
            "name": self.name, "order": self.order.name.lower(), "confidence": round(self.confidence, 2),
            "reason": self.reason, "numbers": numbers, "action": self.action,
        }  # fmt: skip


def confidence(numbers: Sequence[Number]) -> float:
    """Half for having left all limits, and half of the mean excess over them."""
    return 0.5 + 0.5 * sum(one.excess for one in numbers) / len(numbers)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Causes before what they may cause (`Order`), and in each order the surest first."""
    return sorted(findings, key=lambda one: (one.order, -one.confidence))
