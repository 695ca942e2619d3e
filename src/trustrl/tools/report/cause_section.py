"""First section of the page: for each run its outcome and the ranked causes, with their curves, files and changes."""

from html import escape
from typing import Any

from trustrl.tools.explain import RANKING, Cause, Explanation, Number
from trustrl.tools.report.evidence_charts import curves_of
from trustrl.tools.report.html_sections import badges, outcome
from trustrl.tools.report.parting import RULE, Parting
from trustrl.tools.report.report_contents import NOTHING_FOUND, Report, parting_words
from trustrl.tools.report.reported_runs import letter
from trustrl.tools.report.safe_text import said


def causes_section(report: Report, runs: list[dict[str, Any]]) -> str:
    """Renders the outcome of each run and its causes."""
    several = len(runs) > 1
    heads = "".join(_headline(index, run, report.explained[index]) for index, run in enumerate(runs)) if several else ""
    overview = f'<ul class="heads">{heads}{_partings(report)}</ul>' if several else ""
    articles = "\n".join(_run(report, index, run, several=several) for index, run in enumerate(runs))
    return f"""<section id="causes" aria-labelledby="causes-title">
<h2 id="causes-title">{"Causes" if any(x and x.causes for x in report.explained) else "Diagnosis"}</h2>
{overview}
{articles}
</section>"""


def _headline(index: int, run: dict[str, Any], explanation: Explanation | None) -> str:
    first = explanation.causes[0] if explanation and explanation.causes else None
    words = f"<b>{said(first.name)}</b> ({first.confidence:.2f})" if first else _healthy(explanation)
    change = f"; set {_change(first)}" if first and first.change else ""
    label = f"<b>{letter(index)}</b> {said(run['label'])}"
    return f'<li><a href="#causes-{index}">{label}</a> {badges(run)} {words}{change}</li>'


def _partings(report: Report) -> str:
    """Renders where each further run parts from the first: what parts first stays in view, the rest unfolds."""
    first, items = f"<b>{letter(0)}</b>", ""
    for apart in report.partings:
        details = "".join(f"<div><dt>{name}</dt><dd>{said(words)}</dd></div>" for name, words in parting_words(apart))
        earliest = apart.metrics[0] if apart.metrics else None
        when = f"{said(earliest.title)} from step {earliest.step}" if earliest else "no metric beyond the noise"
        when += f", {len(apart.metrics) - 1} more later" if len(apart.metrics) > 1 else ""
        when += f"; {said(_settings(apart))}"
        items += (
            f'<li><details class="sources"><summary><b>{letter(apart.run)}</b> parts from {first}: {when}</summary>'
            f'<dl class="missing">{details}</dl><p class="hint">{RULE}</p></details></li>'
        )
    return items


def _settings(apart: Parting) -> str:
    """Returns the setting that differs, or how many do."""
    if len(apart.settings) == 1:
        return "setting " + parting_words(apart)[0][1]
    return f"{len(apart.settings) or 'no'} settings differ"


def _healthy(explanation: Explanation | None) -> str:
    if explanation is None:
        return "The run has no metrics yet."
    return NOTHING_FOUND


def _run(report: Report, index: int, run: dict[str, Any], *, several: bool) -> str:
    explanation = report.explained[index]
    head = f"<h3>{letter(index)} {said(run['label'])}</h3>" if several else ""
    causes = explanation.causes if explanation else []
    listed = "".join(_cause(report, index, place, cause) for place, cause in enumerate(causes))
    body = f'<ol class="causes">{listed}</ol>' if causes else f'<p class="healthy">{_healthy(explanation)}</p>'
    body += f'<p class="hint">{RANKING}</p>' if len(causes) > 1 else ""
    checked = ", ".join(explanation.checked) if explanation else ""
    body += f'<p class="hint">Checked: {said(checked)}.</p>' if checked else ""
    return f"""<article id="causes-{index}" class="diagnosis">
{head}
<div class="verdict">{badges(run)}{outcome(run)}</div>
{body}{_unchecked(explanation)}
</article>"""


def _unchecked(explanation: Explanation | None) -> str:
    missing = explanation.unchecked if explanation else []
    if not missing:
        return ""
    items = "".join(
        f"<div><dt>{said(gap.what)}</dt><dd>{said(gap.would_tell)} <span>{said(gap.how)}</span></dd></div>"
        for gap in missing
    )
    summary = f"Not checked, because the files lack it ({len(missing)})"
    return f'<details class="sources"><summary>{summary}</summary><dl class="missing">{items}</dl></details>'


def _change(cause: Cause) -> str:
    assert cause.change is not None
    now = "" if cause.change.now is None else f" (now {said(cause.change.now)})"
    return f"<code>{said(cause.change.setting)} = {said(cause.change.value)}</code>{now}"


def _cause(report: Report, index: int, place: int, cause: Cause) -> str:
    kind = f'<span class="badge {"bad" if cause.kind == "cause" else "open"}">{cause.kind}</span>'
    change = f'<p class="change">Change {_change(cause)}</p>' if cause.change else ""
    numbers = "".join(
        f"<li><b>{said(number.metric)}</b> {said(number.words)}. "
        f'<span class="row">{said(number.row)}{_origin(number)}. Healthy: {said(number.healthy)}.</span></li>'
        for number in cause.numbers
    )
    figures = "".join(
        f'<figure id="chart-{chart.key}"><figcaption><strong>{said(chart.title)}</strong></figcaption>'
        '<div class="plot"></div></figure>'
        for chart, _ in curves_of(report.explained[index], cause, f"{index}-{place}", index)
    )
    return f"""<li class="cause">
<h3>{said(cause.name)} {kind}<span class="what">confidence {cause.confidence:.2f}</span></h3>
{change}<p>{said(cause.reason)}</p>
<p class="fix">{said(cause.action)} {_links(report, index, cause)}</p>
<div class="evidence">{figures}</div>
<ul class="numbers">{numbers}</ul>
</li>"""


def _origin(number: Number) -> str:
    return "" if number.source is None else f", by {said(number.source)}"


def _links(report: Report, index: int, cause: Cause) -> str:
    to = f'data-to="{index}" data-step="{cause.step}" data-by="{escape(cause.read_by)}"'
    links = []
    if report.shown[index].listed:
        links.append(f'<a href="#text" {to}>Completions near step {cause.step}</a>')
    if report.tokens[index] is not None:
        links.append(f'<a href="#tokens" {to}>Tokens</a>')
    return " · ".join(links)
