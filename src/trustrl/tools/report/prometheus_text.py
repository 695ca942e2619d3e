"""Runs in the text format of Prometheus, for the textfile collector of node exporter. Opens no socket."""

import math
from collections.abc import Iterator, Mapping

from trustrl.core.metrics import METRICS
from trustrl.tools.report.report_contents import Report
from trustrl.tools.report.reported_runs import ReportedRun
from trustrl.tools.report.safe_text import visible

Sample = tuple[Mapping[str, str], float | None]

TRAINERS = ("reward", "entropy", "grad_norm", "loss", "completion_length", "clip_share", "learning_rate")
"""Metrics of trainers that are exported, under trustrl's names of them."""

MOST_ROWS = 200
"""Rows at the end of a run in which a metric is looked for."""

ABOUT = {
    "step": "Last step with metrics.",
    "running": "1 until the run has finished or failed.",
    "collapsed": "1 if the run collapsed, by the rule of trustrl compare.",
    "cause": "Confidence of each cause that trustrl explain names.",
    "cause_step": "First step at which the evidence of the cause shows.",
    "not_finite": "Metrics of the last row that were not finite.",
    "last_change_timestamp_seconds": "Time at which a file of the run changed last.",
    "held_out_accuracy": "Last held-out accuracy.",
    **{name: f"{name} of the last row that has it." for name in TRAINERS},
    **{metric.name: f"{metric.formula}, in {metric.unit}." for metric in METRICS},
}
"""Description of each exported value."""


def prometheus_text(report: Report, changed: float) -> str:
    """Formats the newest values of every run.

    Args:
        report: The runs.
        changed: Time at which a file of the runs changed last, in seconds since 1970.
    """
    return "".join(_family(name, family) for name, family in samples(report, changed).items())


def samples(report: Report, changed: float) -> dict[str, list[Sample]]:
    """Returns the newest values of every run with their labels, by name."""
    values: dict[str, list[Sample]] = {}
    for index, reported_run in enumerate(report.runs):
        label = {"run": visible(reported_run.label)}
        explanation = report.explained[index]
        for cause in explanation.causes if explanation else ():
            labels = label | {"cause": cause.name, "kind": cause.kind}
            values.setdefault("cause", []).append((labels, cause.confidence))
            values.setdefault("cause_step", []).append((labels, cause.step))
        for name, value in (*_state(reported_run), ("last_change_timestamp_seconds", changed)):
            values.setdefault(name, []).append((label, value))
    return values


def _state(reported_run: ReportedRun) -> Iterator[tuple[str, float | None]]:
    run = reported_run.run
    yield "step", run.steps
    yield "running", run.status not in ("finished", "failed")
    yield "collapsed", reported_run.verdict["collapsed"]
    if run.evaluations:
        yield "held_out_accuracy", run.evaluations[-1]["accuracy"]
    last = run.rows[-1] if run.rows else {}
    yield "not_finite", sum(value is None for value in last.values())
    for name in dict.fromkeys((*TRAINERS, *(metric.name for metric in METRICS))):
        columns = (f"trustrl/{name}", name)
        # TRL logs the metrics of a rollout at its first update only.
        newest = [row[column] for row in reversed(run.rows[-MOST_ROWS:]) for column in columns if column in row]
        yield from ((name, value) for value in newest[:1])


def _family(name: str, family: list[Sample]) -> str:
    about = ABOUT[name].replace("\\", "\\\\").replace("\n", " ")
    lines = [f"# HELP trustrl_{name} {about}", f"# TYPE trustrl_{name} gauge"]
    for labels, value in family:
        listed = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"trustrl_{name}{{{listed}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "NaN" if value is None or not math.isfinite(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
