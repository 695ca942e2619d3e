"""Contents of a report, the summary behind `--json`, and its text for the terminal: a few lines per run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trustrl.errors import TrustRLError
from trustrl.runs.first_completions import read_once
from trustrl.runs.run import Run
from trustrl.runs.run_verdict import COLLAPSE, NO_METRICS
from trustrl.tools.explain import Explanation, explain
from trustrl.tools.report.charts import Chart, charts
from trustrl.tools.report.parting import Parting, parting
from trustrl.tools.report.reported_runs import FACT_LABELS, ReportedRun, facts, region_in_words, reported
from trustrl.tools.report.safe_text import token_texts, visible
from trustrl.tools.report.shown_completions import ShownCompletions, choose_completions
from trustrl.tools.report.token_sample import LABELS, TokenSample, read_tokens

NOTHING_FOUND = "Nothing found: no check points to a fault."

MAX_POINTS, MAX_SHOWN = 60_000, 40_000
"""Maximum tokens in all scatter plots and in all texts of a page, split equally among runs with records."""

MOST_SETTINGS = 8
"""Maximum settings to list that two runs have differently."""

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 32
ASCII = str.maketrans(
    {
        "→": "->", "·": "-", "−": "-", "–": "-", "π": "pi", "μ": "mu", "≤": "<=", "‖": "||", "×": "x", "½": "1/2",
        "²": "^2", "∞": "inf", "\u0302": "^", "‘": "'", "’": "'", "⏎": "\\n", "⇥": "\\t", "…": "...", "◌": "o",
        **dict(zip(BARS, ASCII_BARS, strict=True)),
    }
)  # fmt: skip
"""ASCII replacement of each symbol for terminals without UTF-8."""


@dataclass(frozen=True, slots=True)
class Report:
    """Runs with their charts, recorded tokens, and completions."""

    runs: list[ReportedRun]
    charts: list[Chart]
    tokens: list[TokenSample | None]
    shown: list[ShownCompletions]
    notes: list[str]
    """For each run, the reason its records or completions cannot be read, or empty."""

    explained: list[Explanation | None]
    """Diagnosis of each run. None if it has no metrics."""

    partings: list[Parting]
    """Comparison of each further run with the first, if both have metrics."""

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
    explained: list[Explanation | None] = []
    notes, texts, text_notes = [], [], []
    for _, run in runs:
        sample, listed, diagnosis, note = None, ShownCompletions([], 0), None, ""
        try:
            with read_once(run) as once:
                diagnosis = explain(once) if run.rows else None
                sample = read_tokens(run.records, max_points=max_points // sharing)
                steps = [cause.step for cause in diagnosis.causes] if diagnosis else []
                listed = choose_completions(once, sample, max_shown=max_shown // sharing, near=steps)
        except (TrustRLError, OSError) as error:
            note = f"Cannot read the records of this run: {error}"
        known, missing = ({}, "") if sample is None else token_texts(run.settings.model, _ids(sample, listed))
        explained.append(diagnosis)
        tokens.append(sample)
        shown.append(listed)
        notes.append(note)
        texts.append(known)
        text_notes.append(missing)
    described = reported(runs)
    drawn = charts(described)
    partings = [
        parting(index, explained[0].evidence, other.evidence, drawn)
        for index, other in enumerate(explained)
        if index and other is not None and explained[0] is not None
    ]
    return Report(described, drawn, tokens, shown, notes, explained, partings, texts, text_notes)


def _ids(tokens: TokenSample, shown: ShownCompletions) -> set[int]:
    rows = (token_id for sequence in shown.listed if sequence.columns for token_id in sequence.columns["token_id"])
    listed = (token["token_id"] for token in tokens.most_stopped)
    return {token_id for token_id in (*rows, *listed, *tokens.points["token_id"]) if token_id is not None}


def summary_of(report: Report) -> dict[str, Any]:
    """Returns the report without the page data, as `--json` prints it."""
    return {
        "runs": [_summary(report, index) for index in range(len(report.runs))],
        "partings": [apart.to_dict() for apart in report.partings],
        "collapsed_means": COLLAPSE,
    }


def _summary(report: Report, index: int) -> dict[str, Any]:
    reported_run, tokens = report.runs[index], report.tokens[index]
    run, diagnosis = reported_run.run, report.explained[index]
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
        "findings": [cause.to_dict() for cause in diagnosis.causes] if diagnosis else [],
        "checked": diagnosis.checked if diagnosis else [],
        "metrics": {
            chart.key: _extent(chart, index) for chart in report.charts if any(x.run == index for x in chart.lines)
        },
        "tokens": None if tokens is None else {
            "recorded": tokens.num_rows, "read": tokens.num_read, "signed": tokens.num_signed,
            "verdicts": tokens.verdicts, "sequences": len(tokens.scores),
            "most_stopped": [
                {"text": text_of(row["token_id"], report.texts[index]), **row} for row in tokens.most_stopped
            ],
            "dumps": tokens.dumps,
        },
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


def text_of(token: int | None, texts: dict[int, str]) -> str:
    """Returns a token's text, or its id if the text is unknown."""
    return "?" if token is None else texts.get(token, f"#{token}")


def text(report: Report, *, unicode: bool) -> str:
    """Formats the report for the terminal."""
    blocks = [_block(report, index, summary) for index, summary in enumerate(summary_of(report)["runs"])]
    blocks += [_parting(report, apart) for apart in report.partings]
    whole = "\n\n".join("\n".join(block) for block in blocks)
    return whole if unicode else whole.translate(ASCII).encode("ascii", "backslashreplace").decode()


def _parting(report: Report, apart: Parting) -> list[str]:
    labels = report.runs[apart.run].label, report.runs[0].label
    return [
        "{} parts from {}:".format(*map(visible, labels)),
        *(f"  {name}: {visible(words, 1000)}" for name, words in parting_words(apart)),
    ]


def parting_words(apart: Parting) -> list[tuple[str, str]]:
    """Returns where a run parts from the first one, by kind."""
    settings = ", ".join(f"{x.name} {_known(x.first)} → {_known(x.other)}" for x in apart.settings[:MOST_SETTINGS])
    settings += f" and {len(apart.settings) - MOST_SETTINGS} more" if len(apart.settings) > MOST_SETTINGS else ""
    metrics = ", ".join(
        f"{metric.title} from step {metric.step} ({number(metric.first)} → {number(metric.other)})"
        for metric in apart.metrics
    )
    kinds = [("settings", settings or "none that the files contain"), ("data", apart.data_words())]
    kinds += [("metrics", metrics)] if metrics else []
    return [*kinds, ("alike up to the noise", ", ".join(apart.alike))] if apart.alike else kinds


def _known(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _block(report: Report, index: int, summary: dict[str, Any]) -> list[str]:
    planned = "" if summary["steps_planned"] is None else f" of {summary['steps_planned']}"
    status = "" if summary["status"] == "unknown" else f"{summary['status']}, "
    took = "" if summary["seconds"] is None else f", {summary['seconds']:.0f} s"
    collapsed = ", COLLAPSED" if summary["collapsed"] else ""
    lines = [
        f"{visible(summary['name'])}: {status}step {summary['steps']}{planned}{took}{collapsed}",
    ]
    if (diagnosis := report.explained[index]) is not None:
        lines += ["", *(f"  {visible(line, 500)}" for line in diagnosis.causes_text().splitlines()), ""]
    if summary["accuracy_before"] is not None:
        after = "" if summary["accuracy_after"] is None else f" → {percent(summary['accuracy_after'])}"
        lines.append(f"  {'held-out accuracy':<30}{percent(summary['accuracy_before'])}{after}")
    for chart in report.charts:
        line = next((line for line in chart.lines if line.run == index), None)
        if line is not None and chart.key != "accuracy" and not chart.other:
            unit = f"{summary['rollouts']} rollouts" if chart.key == "reward" else chart.unit
            lines.append(_metric(chart, unit, [value for _, value in line.points]))
    lines += [f"  {visible(summary['region'], 500)}"] if summary["region"] else []
    if summary["facts"]:
        known = (f"{FACT_LABELS.get(name, name)} {visible(value)}" for name, value in summary["facts"].items())
        lines.append(f"  {' · '.join(known)}")
    tokens = summary["tokens"]
    if tokens is not None:
        counts = ", ".join(f"{count:,} {LABELS[name]}" for name, count in tokens["verdicts"].items() if count)
        lines.append(f"  records: {tokens['recorded']:,} tokens × updates: {counts or 'no region decided on them'}")
        if tokens["most_stopped"]:
            listed = ", ".join(f"‘{row['text']}’ {row['stopped']}" for row in tokens["most_stopped"][:8])
            lines.append(f"  masked most often: {listed}")
    if summary["found"]:
        lines.append(f"  read: {'; '.join(visible(source, 200) for source in summary['found'])}")
    lines += [f"  missing: {visible(x['what'])}. {visible(x['would_tell'], 200)}" for x in summary["missing"]]
    lines += [f"  {visible(note, 300)}" for note in summary["notes"]]
    if summary["last_words"]:
        lines += ["  last log lines:", *(f"    {visible(line, 200)}" for line in summary["last_words"].splitlines())]
    return lines


def _metric(chart: Chart, unit: str, values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    show = percent if chart.percent else number
    ends = f"{show(finite[0])} → {show(finite[-1])}" if finite else "never finite"
    most = f", highest {show(max(finite))}" if finite else ""
    missing = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    unit = "" if chart.percent else f" ({unit})"
    title = chart.title if chart.title[1].isupper() else chart.title[0].lower() + chart.title[1:]
    return f"  {title:<30}{sparkline(values)}  {ends}{most}{unit}{missing}"


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """Draws values as bars of eight heights, scaled from minimum to maximum. Non-finite values are blank.

    Example:
        >>> sparkline([0.0, 1.0, None, 0.5])
        '▁█ ▅'
    """
    per = max(1, -(-len(values) // width))
    means = []
    for start in range(0, len(values), per):
        some = [value for value in values[start : start + per] if value is not None]
        means.append(sum(some) / len(some) if some else None)
    finite = [mean for mean in means if mean is not None]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[int((mean - low) * scale + 0.5)] for mean in means)


def percent(share: float) -> str:
    """Formats a share as a percentage."""
    return f"{100 * share:.1f}%"


def number(x: float) -> str:
    """Formats a number with three significant digits."""
    return f"{x:.3g}"
