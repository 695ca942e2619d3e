"""Contents of a report, and the summary behind `--json`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trustrl.errors import TrustRLError
from trustrl.runs.run import Run
from trustrl.runs.run_verdict import COLLAPSE, NO_METRICS
from trustrl.tools.report.charts import Chart, charts
from trustrl.tools.report.reported_runs import ReportedRun, facts, region_in_words, reported
from trustrl.tools.report.safe_text import token_texts
from trustrl.tools.report.shown_completions import ShownCompletions, choose_completions
from trustrl.tools.report.token_sample import TokenSample, read_tokens

MAX_POINTS, MAX_SHOWN = 60_000, 40_000
"""Maximum tokens in all scatter plots and in all texts of a page, split equally among runs with records."""


@dataclass(frozen=True, slots=True)
class Report:
    """Runs with their charts, recorded tokens, and completions."""

    runs: list[ReportedRun]
    charts: list[Chart]
    tokens: list[TokenSample | None]
    shown: list[ShownCompletions]
    notes: list[str]
    """For each run, the reason its records or completions cannot be read, or empty."""

    texts: list[dict[int, str]]
    text_notes: list[str]
    """For each run, the reason its tokens are shown as ids without text, or empty."""


def gather(runs: Sequence[tuple[str, Run]], *, max_points: int = MAX_POINTS, max_shown: int = MAX_SHOWN) -> Report:
    """Reads the records, completions, and tokenizers of runs. Those that cannot be read are skipped with a note.

    Args:
        runs: Runs with their labels, as `trustrl.runs.open_run.open_runs` returns them.
        max_points: Maximum tokens in all scatter plots.
        max_shown: Maximum tokens in all texts.
    """
    sharing = max(1, sum(bool(run.records) for _, run in runs))
    tokens: list[TokenSample | None] = []
    shown: list[ShownCompletions] = []
    notes, texts, text_notes = [], [], []
    for _, run in runs:
        sample, listed, note = None, ShownCompletions([], 0), ""
        try:
            sample = read_tokens(run.records, max_points=max_points // sharing)
            listed = choose_completions(run, sample, max_shown=max_shown // sharing)
        except (TrustRLError, OSError) as error:
            note = f"Cannot read the records of this run: {error}"
        known, missing = ({}, "") if sample is None else token_texts(run.settings.model, _ids(sample, listed))
        tokens.append(sample)
        shown.append(listed)
        notes.append(note)
        texts.append(known)
        text_notes.append(missing)
    described = reported(runs)
    return Report(described, charts(described), tokens, shown, notes, texts, text_notes)


def _ids(tokens: TokenSample, shown: ShownCompletions) -> set[int]:
    rows = (token_id for sequence in shown.listed if sequence.columns for token_id in sequence.columns["token_id"])
    listed = (token["token_id"] for token in tokens.most_stopped)
    return {token_id for token_id in (*rows, *listed, *tokens.points["token_id"]) if token_id is not None}


def summary_of(report: Report) -> dict[str, Any]:
    """Returns the report without the page data, as `--json` prints it."""
    return {"runs": [_summary(report, index) for index in range(len(report.runs))], "collapsed_means": COLLAPSE}


def _summary(report: Report, index: int) -> dict[str, Any]:
    reported_run, tokens = report.runs[index], report.tokens[index]
    run = reported_run.run
    verdict = {name: value for name, value in reported_run.verdict.items() if name != "steps"}
    if len(run.evaluations) < 2:  # measured only before training
        verdict["accuracy_after"] = None
    return {
        "name": run.name,
        "label": reported_run.label,
        "path": run.path,
        "source": run.source,
        "status": run.status,
        "steps": run.steps,
        "steps_planned": run.settings.steps_planned,
        "seconds": run.seconds,
        "region": region_in_words(
            reported_run.region, reported_run.plain_region, observed=reported_run.observed
        ) or None,
        "facts": facts(run),
        **verdict,
        "metrics": {
            chart.key: _extent(chart, index) for chart in report.charts if any(x.run == index for x in chart.lines)
        },
        "tokens": None if tokens is None else _token_summary(tokens, report.texts[index]),
        "completions": report.shown[index].num_known,
        "found": list(run.found),
        "missing": [asdict(missing) for missing in run.missing],
        "notes": [
            *([NO_METRICS] if run.recipe and not run.rows else []), *run.faults,
            *filter(None, (report.notes[index], report.text_notes[index])),
        ],
        "last_words": run.last_words,
    }  # fmt: skip


def _extent(chart: Chart, index: int) -> dict[str, Any]:
    points = next(line.points for line in chart.lines if line.run == index)
    values = [value for _, value in points if value is not None]
    ends = {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)} if values else {}
    return {"title": chart.title, "unit": chart.unit, **ends, "not_finite": len(points) - len(values)}


def _token_summary(tokens: TokenSample, texts: dict[int, str]) -> dict[str, Any]:
    listed = [{"text": text_of(token["token_id"], texts), **token} for token in tokens.most_stopped]
    return {
        "recorded": tokens.num_rows, "read": tokens.num_read, "signed": tokens.num_signed, "verdicts": tokens.verdicts,
        "sequences": len(tokens.scores), "most_stopped": listed, "dumps": tokens.dumps,
    }  # fmt: skip


def text_of(token: int | None, texts: dict[int, str]) -> str:
    """Returns a token's text, or its id if the text is unknown."""
    return "?" if token is None else texts.get(token, f"#{token}")
