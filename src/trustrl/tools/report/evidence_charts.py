"""Curves on which the numbers of causes stand."""

from collections.abc import Iterator

from trustrl.tools.explain import Cause, Explanation, Number
from trustrl.tools.report.charts import Chart, Line, thinned
from trustrl.tools.report.report_contents import Report

MOST_CURVES = 3
"""Maximum curves of one cause."""


def evidence_charts(report: Report) -> Iterator[tuple[Chart, list[Number]]]:
    """Yields the curves of all causes, each with the numbers to mark."""
    for run, explanation in enumerate(report.explained):
        for place, cause in enumerate(explanation.causes if explanation else ()):
            yield from curves_of(explanation, cause, f"{run}-{place}", run)


def curves_of(
    explanation: Explanation | None, cause: Cause, key: str, run: int
) -> Iterator[tuple[Chart, list[Number]]]:
    """Yields the curves of one cause with the numbers to mark on each."""
    numbers: dict[str, list[Number]] = {}
    for number in cause.numbers:
        numbers.setdefault(number.metric, []).append(number)
    curves = {name: explanation.curve(marked[0]) for name, marked in numbers.items()} if explanation else {}
    drawn = [name for name, points in curves.items() if len(points) > 1]
    for place, name in enumerate(drawn[:MOST_CURVES]):
        line = Line(run, thinned(curves[name]), [])
        yield Chart(key=f"{key}-{place}", title=name, unit="", lines=[line]), numbers[name]
