"""Corpus of expectations, and its results on one loss."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from trustrl.config.validators import one_of
from trustrl.errors import EngineError
from trustrl.tools.conformance.batch_invariants import BATCH_INVARIANTS
from trustrl.tools.conformance.bounds import BOUNDS, TABLES
from trustrl.tools.conformance.expectations import KINDS, Adapter, Expectation, Verdict, ask, healthy
from trustrl.tools.conformance.faults import FAULTS

GROUPS: dict[str, tuple[Expectation, ...]] = {
    "invariants": BATCH_INVARIANTS, "faults": FAULTS, "truth tables": TABLES, "bounds": BOUNDS,
}  # fmt: skip
"""The corpus by group, in the order in which it runs."""

EXPECTATIONS = tuple(expectation for group in GROUPS.values() for expectation in group)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case: the expectation, the actual outcome, and the verdict."""

    group: str
    case: str
    verdict: Verdict
    expected: str
    got: str
    because: str


def run(loss: Adapter, kind: str = "any") -> list[Result]:
    """Runs every expectation of a kind and returns the results in the order of the corpus.

    Raises:
        ConfigError: If the kind is unknown.
        EngineError: If the loss does not have a finite answer to a valid batch.
    """
    one_of("kind", kind, KINDS)
    first = ask(loss, healthy())
    if not first.is_finite:
        raise EngineError(
            f"The loss must accept a valid batch of 4 rows and 6 columns, got {first.short()}. "
            "Choose another --adapter, or pass the settings it needs as key=value."
        )
    results = []
    for group, expectations in GROUPS.items():
        for case in expectations:
            if kind in case.kinds:
                outcome = case.check(loss)
                results.append(Result(group, case.name, outcome.verdict, outcome.expected, outcome.got, case.because))
    return results


def counts(results: list[Result]) -> dict[str, int]:
    """Returns the number of results with each verdict."""
    return dict(Counter(result.verdict for result in results))


def to_dict(results: list[Result]) -> list[dict[str, Any]]:
    """Returns the results as `trustrl conformance --json` prints them."""
    return [asdict(result) for result in results]


def text(results: list[Result], *, everything: bool = False) -> str:
    """Formats the results for the terminal. Cases that pass are listed only if `everything` is True."""
    shown = [result for result in results if everything or result.verdict != "passes"]
    lines = []
    for result in shown:
        lines.append(f"{result.verdict:<8} {result.case}")
        if result.expected:
            lines.append(f"{'':<8}   expected  {result.expected}")
        lines.append(f"{'':<8}   got       {result.got}")
    totals = counts(results)
    lines.append(
        ", ".join(f"{totals.get(verdict, 0)} {verdict}" for verdict in ("passes", "fails", "differs", "tells"))
    )
    return "\n".join(lines)
