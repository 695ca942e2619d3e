"""Report for the terminal: a few lines per run, with sparklines."""

from collections.abc import Sequence
from typing import Any

from trustrl.tools.report.charts import Chart
from trustrl.tools.report.report_contents import Report, summary_of
from trustrl.tools.report.reported_runs import FACT_LABELS
from trustrl.tools.report.safe_text import visible
from trustrl.tools.report.token_sample import LABELS

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


def text(report: Report, *, unicode: bool) -> str:
    """Formats the report for the terminal."""
    blocks = [_block(report, index, summary) for index, summary in enumerate(summary_of(report)["runs"])]
    whole = "\n\n".join("\n".join(block) for block in blocks)
    return whole if unicode else whole.translate(ASCII).encode("ascii", "backslashreplace").decode()


def _block(report: Report, index: int, summary: dict[str, Any]) -> list[str]:
    planned = "" if summary["steps_planned"] is None else f" of {summary['steps_planned']}"
    status = "" if summary["status"] == "unknown" else f"{summary['status']}, "
    took = "" if summary["seconds"] is None else f", {summary['seconds']:.0f} s"
    collapsed = ", COLLAPSED" if summary["collapsed"] else ""
    lines = [
        f"{visible(summary['name'])}: {status}step {summary['steps']}{planned}{took}{collapsed}",
        *([f"  {visible(summary['region'], 500)}"] if summary["region"] else []),
    ]
    if summary["facts"]:
        known = (f"{FACT_LABELS.get(name, name)} {visible(value)}" for name, value in summary["facts"].items())
        lines.append(f"  {' · '.join(known)}")
    if summary["accuracy_before"] is not None:
        after = "" if summary["accuracy_after"] is None else f" → {percent(summary['accuracy_after'])}"
        lines.append(f"  {'held-out accuracy':<30}{percent(summary['accuracy_before'])}{after}")
    for chart in report.charts:
        line = next((line for line in chart.lines if line.run == index), None)
        if line is not None and chart.key != "accuracy" and not chart.other:
            unit = f"{summary['rollouts']} rollouts" if chart.key == "reward" else chart.unit
            lines.append(_metric(chart, unit, [value for _, value in line.points]))
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
