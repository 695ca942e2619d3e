"""Data that the page's script draws: charts, packed columns of tokens, and completions."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from trustrl.files import finite
from trustrl.tools.explain import Number
from trustrl.tools.report.charts import Chart, Point
from trustrl.tools.report.evidence_charts import evidence_charts
from trustrl.tools.report.report_contents import Report, text_of
from trustrl.tools.report.reported_runs import ReportedRun, letter, measured_step, statistic_of
from trustrl.tools.report.safe_text import visible
from trustrl.tools.report.shown_completions import NUMBERS, TRUNCATED, ShownCompletion
from trustrl.tools.report.token_sample import LABELS, MEANINGS, VERDICTS

LONGEST_PROMPT, LONGEST_TEXT = 4000, 6000
"""Maximum characters of a prompt, and of a completion whose tokens are not recorded."""


def page_data(report: Report) -> dict[str, Any]:
    """Returns the data that the page's script draws."""
    words: dict[str, int] = {}
    return {
        "runs": [{"label": visible(run.label), "name": visible(run.run.name)} for run in report.runs],
        "charts": [
            *(_chart(chart) | {"marks": [_mark(number) for number in on]} for chart, on in evidence_charts(report)),
            *(_chart(chart) | {"marks": _parted(report, chart)} for chart in report.charts),
        ],
        "verdicts": [{"name": LABELS[name], "meaning": MEANINGS[name]} for name in VERDICTS],
        "tokens": [_run_data(report, index, words) for index in range(len(report.runs))],
        "texts": list(words),
    }


def _chart(chart: Chart) -> dict[str, Any]:
    band = chart.band
    return {
        "key": chart.key, "title": visible(chart.title, 200), "unit": chart.unit, "percent": chart.percent,
        "bound": chart.bound,
        "band": None if band is None else finite([band.low, band.high]),
        "lines": [
            {"run": line.run, "points": _rounded(line.points), "means": _rounded(line.means)} for line in chart.lines
        ],
    }  # fmt: skip


def _parted(report: Report, chart: Chart) -> list[dict[str, Any]]:
    return [
        {"step": metric.step, "run": apart.run, "text": f"{letter(apart.run)} parts"}
        for apart in report.partings
        for metric in apart.metrics
        if metric.key == chart.key
    ]


def _mark(number: Number) -> dict[str, Any]:
    # The number may be a median over later batches, so it does not stand at this point of the curve.
    return {"step": number.step, "text": "not finite" if number.value is None else f"from step {number.step}"}


def _rounded(points: Sequence[Point]) -> list[Point]:
    return [(step, None if value is None else float(f"{value:.6g}")) for step, value in points]


def _run_data(report: Report, index: int, words: dict[str, int]) -> dict[str, Any] | None:
    run, tokens, texts = report.runs[index], report.tokens[index], report.texts[index]
    shown = report.shown[index].listed
    if tokens is None and not shown:
        return None

    def columns(table: Mapping[str, list[Any]]) -> dict[str, str]:
        """Packs columns. Tokens become indices into the texts, and columns without recorded numbers are dropped."""
        kinds = {"verdict": "b", "position": "i", "step": "i"}
        there = {name: x for name, x in table.items() if name not in NUMBERS or any(value is not None for value in x)}
        places = [words.setdefault(text_of(token_id, texts), len(words)) for token_id in there.pop("token_id")]
        return {"text": packed("i", places), **{name: packed(kinds.get(name, "f"), x) for name, x in there.items()}}

    names = ("position", "token_id", "verdict", *NUMBERS)
    rows = {name: [x for completion in shown if completion.columns for x in completion.columns[name]] for name in names}
    points = {} if tokens is None else dict(tokens.points)
    if points:
        places = zip(points["step"], points.pop("update"), strict=True)
        points["step"] = [measured_step(run.run, *place) for place in places]
    prompts: dict[str, int] = {}
    groups: dict[str, int] = {}
    completions, start = [], 0
    for number, each in enumerate(shown):
        completions.append(_completion(number, each, prompts, groups) | {"start": start})
        if each.completion.text is not None and (each.columns is None or not texts):
            completions[-1]["text"] = visible(each.completion.text, LONGEST_TEXT, lines=True)
        start += len(each.columns["token_id"]) if each.columns else 0
    return {
        "points": None if tokens is None else columns(points),
        "mu": None if tokens is None else tokens.mu,
        "decided": tokens is not None and bool(tokens.verdicts),
        "edge": edge_of(run),
        "completions": completions,
        "prompts": list(prompts),
        "rows": columns(rows),
    }


def _completion(number: int, shown: ShownCompletion, prompts: dict[str, int], groups: dict[str, int]) -> dict[str, Any]:
    completion, score = shown.completion, shown.score
    prompt = None if completion.prompt is None else visible(completion.prompt, LONGEST_PROMPT, lines=True)
    fields = {
        "name": f"{completion.sequence:x}"[:8] if completion.sequence is not None else str(number + 1),
        "step": completion.step,
        "prompt": None if prompt is None else prompts.setdefault(prompt, len(prompts)),
        "group": None if completion.group is None else groups.setdefault(completion.group, len(groups)),
        "task": None if completion.task_id is None else visible(completion.task_id),
        "reward": completion.reward,
        "rewards": {visible(name): value for name, value in completion.rewards.items()},
        "advantage": completion.advantage if completion.advantage is not None else score and score.advantage,
        "stop": None if completion.stop_reason is None else visible(completion.stop_reason),
        "truncated": completion.stop_reason in TRUNCATED if completion.stop_reason is not None else None,
        "tokens": score.tokens if score else completion.num_tokens,
        "rows": len(shown.columns["token_id"]) if shown.columns else 0,
    }
    if score is not None:
        fields |= {name: getattr(score, name) for name in ("stopped", "changed", "log_ratio", "gap")}
    return {name: value for name, value in finite(fields).items() if value is not None and value != {}}


def edge_of(run: ReportedRun) -> dict[str, Any] | None:
    """Returns the region's threshold on the ratio or the probability gap, or None if it depends on other tokens."""
    statistic = statistic_of(run.region)
    if run.region is None or statistic is None or statistic.kind not in ("ratio", "binary-tv"):
        return None
    needs = run.region.needs()
    if needs.sequences or needs.anchor != "behavior":
        return None
    low, high = (None if bound == float("inf") else bound for bound in statistic.bounds)
    return {"on": "ratio" if statistic.kind == "ratio" else "gap", "low": low, "high": high}


def packed(kind: str, values: Sequence[float | int | None]) -> str:
    """Encodes numbers as little-endian base64, with None as NaN.

    This takes a twentieth of the time and a third of the bytes of a JSON list.

    Example:
        >>> packed("i", [1, 2])
        'AQAAAAIAAAA='
    """
    nothing = float("nan") if kind == "f" else -1
    numbers = array(kind, [nothing if value is None else value for value in values])
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
