"""Every expectation of a kind, on one loss."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from trustrl.config.checks import one_of
from trustrl.conformance.adapters import Adapter
from trustrl.conformance.answers import ask
from trustrl.conformance.batches import healthy
from trustrl.conformance.bounds import BOUNDS
from trustrl.conformance.expectations import KINDS, Expectation, Verdict
from trustrl.conformance.faults import FAULTS
from trustrl.conformance.hygiene import HYGIENE
from trustrl.conformance.tables import TABLES
from trustrl.errors import EngineError

EXPECTATIONS: tuple[Expectation, ...] = (*HYGIENE, *FAULTS, *TABLES, *BOUNDS)


@dataclass(frozen=True, slots=True)
class Result:
    """One row: what was expected, what came, and the verdict."""

    case: str
    verdict: Verdict
    expected: str
    got: str
    because: str


def run(loss: Adapter, kind: str = "any") -> list[Result]:
    """All results, in the order of the corpus.

    Raises:
        ConfigError: no such kind.
        EngineError: the loss has no finite answer to a batch with which nothing is wrong.
    """
    one_of("kind", kind, KINDS)
    first = ask(loss, healthy())
    if not first.is_finite:
        raise EngineError(
            f"The loss must accept a healthy batch of 4 rows and 6 columns, got {first.short()}. "
            "Choose another --adapter, or give it the settings it needs as key=value."
        )
    return [_result(expectation, loss) for expectation in EXPECTATIONS if kind in expectation.kinds]


def _result(expectation: Expectation, loss: Adapter) -> Result:
    found = expectation.check(loss)
    return Result(expectation.name, found.verdict, found.expected, found.got, expectation.because)


def counts(results: list[Result]) -> dict[str, int]:
    """How many of each verdict."""
    return dict(Counter(result.verdict for result in results))


def to_dict(results: list[Result]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(result) for result in results]


def text(results: list[Result], *, everything: bool = False) -> str:
    """A table: what fails, what differs and what was measured; what passes only where asked."""
    shown = [result for result in results if everything or result.verdict != "passes"]
    lines = []
    for result in shown:
        lines.append(f"{result.verdict:<8} {result.case}")
        if result.expected:
            lines.append(f"{'':<8}   expected  {result.expected}")
        lines.append(f"{'':<8}   got       {result.got}")
    found = counts(results)
    lines.append(", ".join(f"{found.get(verdict, 0)} {verdict}" for verdict in ("passes", "fails", "differs", "tells")))
    return "\n".join(lines)
