"""Causes that the rules report: evidence, confidence, fix, the setting to change, and rank."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from trustrl.core.metrics import METRICS
from trustrl.tools.explain.changes import Change

ACCURACY = "held-out accuracy"

HEALTHY = {f"trustrl/{metric.name}": metric.healthy for metric in METRICS} | {
    "loss": "finite",
    "grad_norm": "finite",
    "reward": "rises, or stays near its best",
    ACCURACY: "rises",
    "entropy change": "below 0.3 for the three largest",
    "trustrl/stale_replicas": "0",
    "trustrl/replica_gap_max": "near that of the other replicas",
    "frac_reward_zero_std": "below 0.5",
    "frac_reward_nan": "0",
    "completions without a reward": "0",
    "prompts that are repeated in a batch": "0",
    "clip_share": "a few percent",
    "completions/clipped_ratio": "below 0.1",
    "response_length/clip_ratio": "below 0.1",
}
"""Healthy range of each number: from the metric dictionary, or a description for metrics that engines log."""


ORDERS = {
    "reward": "lowest reward",
    "best": "highest reward",
    "gap": "largest sampler-trainer gap",
    "log_ratio": "largest |log π/μ|",
    "truncated": "truncated",
}
"""Orders of completions in a report."""


class Order(IntEnum):
    """Place of a cause between data and outcome."""

    INPUT = 0
    """The inputs contain non-finite values."""

    SAMPLER = 1
    """The sampler's policy is not the one the trainer assumes."""

    STEP = 2
    """The policy moves too far."""

    SYMPTOM = 3
    """The run can no longer learn."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number that supports a cause, with the limit it exceeds."""

    metric: str
    step: int
    """First of the steps at which it lies beyond its limit, or was measured."""

    value: float | None
    """None if it was not finite."""

    limit: float
    side: Literal["above", "below"]
    what: str
    """Steps and aggregation, such as "median over batches"."""

    source: str | None = None
    """Logged metrics that it was computed from. None if the run logged it itself."""

    file: str = ""
    """File of the run with the row of `step`."""

    @property
    def healthy(self) -> str:
        """Range of the number in a healthy run."""
        return HEALTHY.get(self.metric, "depends on the task")

    @property
    def words(self) -> str:
        """The value with its limit."""
        beyond = f"{self.side} {self.limit:.3g}: {self.what}"
        return "not finite" if self.value is None else f"{self.value:.3g}, {beyond}"

    @property
    def row(self) -> str:
        """The row that holds the number, or the first of those it was computed from."""
        return f"{self.file or 'metrics'}, from step {self.step}"

    @property
    def excess(self) -> float:
        """Distance beyond the limit: 0 at the limit, 0.5 at twice (or half) of it, 1 far beyond or not finite."""
        if self.value is None:
            return 1.0
        near, far = (self.limit, self.value) if self.side == "above" else (self.value, self.limit)
        return 0.0 if far <= 0 else min(1.0, max(0.0, 1 - near / far))


@dataclass(frozen=True, slots=True)
class Cause:
    """One likely cause of a failed run."""

    name: str
    order: Order
    confidence: float
    """A score for comparing causes, not a probability. See `confidence`."""

    reason: str
    numbers: tuple[Number, ...]
    action: str
    change: Change | None = None
    """The setting to change. None if no setting repairs the cause."""

    read_by: str = "reward"
    """Key of `ORDERS`: the completions to read first."""

    @property
    def kind(self) -> Literal["cause", "symptom"]:
        """A symptom follows from a cause, which may not be in the list."""
        return "symptom" if self.order is Order.SYMPTOM else "cause"

    @property
    def step(self) -> int:
        """Step of the first number."""
        return self.numbers[0].step

    @property
    def rank(self) -> tuple[bool, float]:
        """Key to sort by: causes before symptoms, each by confidence."""
        return self.kind == "symptom", -self.confidence

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl explain --json` prints."""
        numbers = [asdict(number) | {"healthy": number.healthy} for number in self.numbers]
        return {
            "name": self.name, "kind": self.kind, "order": self.order.name.lower(),
            "confidence": round(self.confidence, 2), "reason": self.reason, "numbers": numbers, "action": self.action,
            "change": None if self.change is None else asdict(self.change),
        }  # fmt: skip


def confidence(numbers: Sequence[Number]) -> float:
    """Returns 0.5, for exceeding every limit, plus half of the mean excess."""
    return 0.5 + 0.5 * sum(number.excess for number in numbers) / len(numbers)
