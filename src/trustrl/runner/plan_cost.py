"""GPU hours, duration and price of a run, from a throughput and a price that the user gives."""

from dataclasses import dataclass
from typing import Any

from trustrl.config import validators


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run's sampling and training.

        GPU hours = completion tokens / (3,600 × tokens per second and GPU),   price = GPU hours × price of one

    Evaluations, start-up and repeated steps are not included.
    """

    tokens: int
    """Completion tokens of the whole run."""

    gpus: int
    """Number of GPUs; of processes, on CPUs."""

    tokens_per_second: float | None
    """Completion tokens that one GPU samples and trains in a second. None if unknown, and so is the cost."""

    price: float | None
    """Price of a GPU hour."""

    def __post_init__(self) -> None:
        for option, value in (("--tokens-per-second", self.tokens_per_second), ("--price", self.price)):
            if value is not None:
                validators.real(option, value, rule="a finite number > 0", low=0.0, high=1e15)

    @property
    def gpu_hours(self) -> float | None:
        """Hours of one GPU."""
        return None if self.tokens_per_second is None else self.tokens / (3600 * self.tokens_per_second)

    @property
    def total(self) -> float | None:
        """Price of the run."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    def to_dict(self) -> dict[str, Any]:
        """Returns the cost as plain data."""
        hours = self.gpu_hours
        return {"gpu_hours": hours, "hours": None if hours is None else hours / self.gpus, "price": self.total}

    def text(self) -> list[str]:
        """Formats the cost with its formulas, and the options that are missing."""
        lines, hours, total = ["Cost (without evaluations, start-up and repeated steps)"], self.gpu_hours, self.total
        if hours is None:
            lines.append(
                "  GPU hours     give --tokens-per-second, the completion tokens that a GPU samples and trains"
            )
        else:
            lines += [
                "  GPU hours     completion tokens / (3,600 × tokens per second and GPU) = "
                f"{self.tokens:,} / (3,600 × {self.tokens_per_second:,g}) = {_short(hours)}",
                f"  duration      GPU hours / GPUs = {_short(hours)} / {self.gpus} = {_short(hours / self.gpus)} hours",
            ]
            if total is not None:
                lines.append(f"  price         GPU hours × price = {_short(hours)} × {self.price:,g} = {_short(total)}")
        if self.price is None:
            lines.append("  price         give --price, the price of a GPU hour")
        return [*lines, ""]


def _short(x: float) -> str:
    return f"{x:,.1f}" if x >= 100 else f"{x:.3g}"
