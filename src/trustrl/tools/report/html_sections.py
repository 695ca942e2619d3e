"""Sections of the page below the causes: curves, tokens, completions, settings, and explanations of metrics."""

from html import escape
from typing import Any

from trustrl.runs.run import Run
from trustrl.tools.report.charts import Chart
from trustrl.tools.report.page_data import edge_of
from trustrl.tools.report.report_contents import Report, percent
from trustrl.tools.report.reported_runs import FACT_LABELS, letter, measured_step
from trustrl.tools.report.safe_text import said, visible
from trustrl.tools.report.shown_completions import ShownCompletions
from trustrl.tools.report.token_sample import LABELS, MEANINGS, VERDICTS, WITH_GRADIENT, TokenSample

DASHES, COLOURS = 6, 8
NO_REGION = "No trustrl region: the engine's own loss trained this run."
_EDGE = '<svg width="24" height="14" aria-hidden="true"><path class="edge" d="M1 7H23"/></svg>'
SMOOTHING = (("auto", "automatic"), ("0", "off"), ("0.02", "2%"), ("0.05", "5%"), ("0.1", "10%"), ("0.2", "20%"))
"""Widths of the running mean, as a share of a line's points."""


def runs_section(runs: list[dict[str, Any]]) -> str:
    """Renders one card per run, and the facts that all runs share."""
    shared = {
        name: value for name, value in runs[0]["facts"].items() if all(run["facts"].get(name) == value for run in runs)
    }
    cards = "\n".join(
        _card(index, run, shared if len(runs) > 1 else {}, several=len(runs) > 1) for index, run in enumerate(runs)
    )
    in_all = f"<h3>Common to all runs</h3>{_facts(shared)}" if len(runs) > 1 and shared else ""
    return f"""<section id="runs" aria-labelledby="runs-title">
<h2 id="runs-title">Settings</h2>
<div class="cards{"" if len(runs) > 1 else " one"}">
{cards}
</div>
<div class="shared">{in_all}</div>
</section>"""


def _facts(shown: dict[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{escape(FACT_LABELS.get(name, name))}</dt><dd>{said(value)}</dd></div>"
        for name, value in shown.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _card(index: int, run: dict[str, Any], shared: dict[str, str], *, several: bool) -> str:
    dash, colour = (index + index // COLOURS) % DASHES, index % COLOURS
    path = f'<path class="run d{dash}" d="M2 5H32"/>'
    swatch = f'<svg width="34" height="10" aria-hidden="true" class="c{colour}">{path}</svg>'
    head = f"<h3>{swatch}{letter(index)}&ensp;{said(run['label'])}</h3>" if several else ""
    shown = {name: value for name, value in run["facts"].items() if name not in shared}
    steps = f"{run['steps']}" if run["steps_planned"] is None else f"{run['steps']} of {run['steps_planned']}"
    shown |= {"steps": steps}
    if run["rollouts"]:
        shown["rollouts"] = str(run["rollouts"])
    if run["reward_first"] is not None:
        first, best, last = (f"{run[f'reward_{part}']:.2f}" for part in ("first", "best", "last"))
        shown["reward, first → best → last"] = f"{first} → {best} → {last}"
    for key, word in (("masked_share", "masked, mean over steps"), ("projected_share", "projected, mean over steps")):
        if run[key] is not None:
            shown[word] = percent(run[key])
    if run["seconds"] is not None:
        shown["time"] = f"{run['seconds']:,.0f} s"
    notes = "".join(f'<p class="note">{said(note)}</p>' for note in run["notes"])
    words = f"<pre>{escape(chr(10).join(visible(x, 300) for x in run['last_words'].splitlines()))}</pre>"
    return f"""<article class="card">
{head}
<p class="region">{said(run["region"] or NO_REGION)}</p>
{_facts(shown)}
{notes}{words if run["last_words"] else ""}
{_sources(run, opened=bool(run["missing"]) and not several)}
</article>"""


def outcome(run: dict[str, Any]) -> str:
    """Renders the held-out accuracy before and after training."""
    if run["accuracy_before"] is None:
        return '<span class="what">held-out accuracy was not measured</span>'
    before, after, what = percent(run["accuracy_before"]), "", "held-out accuracy, before training"
    if run["accuracy_after"] is not None:
        after, what = f" → {percent(run['accuracy_after'])}", "held-out accuracy, before → after"
    return f'<span class="figure">{before}{after}</span><span class="what">{what}</span>'


def badges(run: dict[str, Any]) -> str:
    """Renders the status of a run, and whether it collapsed."""
    kind = {"finished": "good", "failed": "bad"}.get(run["status"], "open")
    planned = "" if run["steps_planned"] is None else f" of {run['steps_planned']}"
    progress = f"step {run['steps']}{planned}"
    status = {"finished": "finished", "unknown": progress}.get(run["status"], f"{run['status']}, {progress}")
    collapsed = '<span class="badge bad">collapsed</span>' if run["collapsed"] else ""
    return f'<span class="badge {kind}">{escape(status)}</span>{collapsed}'


def _sources(run: dict[str, Any], *, opened: bool) -> str:
    """Renders the box of findings: the files that were read, and the questions that missing data leave open."""
    sources, missing = run["found"], run["missing"]
    if not sources and not missing:
        return ""
    lacking = f", {len(missing)} missing" if missing else ""
    items = "".join(f"<li>{said(source)}</li>" for source in sources)
    lines = "".join(
        f"<div><dt>{said(gap['what'])}</dt><dd>{said(gap['would_tell'])} <span>{said(gap['how'])}</span></dd></div>"
        for gap in missing
    )
    have = f"<ul>{items}</ul>" if items else ""
    lack = f'<h4>Missing, and the question it would answer</h4><dl class="missing">{lines}</dl>' if lines else ""
    return (
        f'<details class="sources"{" open" if opened else ""}>'
        f"<summary>Read from {said(run['source'])}{lacking}</summary>{have}{lack}</details>"
    )


def curves_section(report: Report) -> str:
    """Renders the frames of the charts. The script draws into them."""
    first = "\n".join(_figure(chart) for chart in report.charts if not chart.other)
    others = "\n".join(_figure(chart) for chart in report.charts if chart.other)
    folded = ""
    if others:
        title = f"All other metrics of the log ({sum(chart.other for chart in report.charts)})"
        body = f'<summary>{title}</summary><div class="grid">{others}</div>'
        folded = f'<details id="others" class="others">{body}</details>'
    if not report.charts:
        bar = ""
        first = '<p class="hint">The run has no metrics yet.</p>'
    else:
        options = "".join(f'<option value="{value}">{word}</option>' for value, word in SMOOTHING)
        bar = f"""<p class="hint">Hover over a chart, or focus it and use the arrow keys, to read a step. Drag across a
chart, or press + and −, to zoom all of them; double-click or press 0 for the whole run. ✕ marks a non-finite value.</p>
<div class="bar"><label for="smooth">Smoothing</label><select id="smooth" autocomplete="off">{options}</select>
<span class="buttons" role="group" aria-label="Zoom"><button id="zoom-in" type="button" aria-label="Zoom in">+</button>
<button id="zoom-out" type="button" aria-label="Zoom out">−</button>
<button id="zoom-reset" type="button">Whole run</button></span>
<output id="zoomed" for="zoom-in zoom-out zoom-reset"></output></div>"""
    return f"""<section id="curves" aria-labelledby="curves-title">
<h2 id="curves-title">Curves</h2>
{bar}
<div class="grid">
{first}
</div>
{folded}
</section>"""


def _figure(chart: Chart) -> str:
    band = f"Shaded: healthy ({chart.band.source})." if chart.band else ""
    about = " ".join(filter(None, (chart.about, band)))
    note = f'<span class="about">{said(about)}</span>' if about else ""
    key = escape(chart.key)
    title = said(chart.title, 200)
    why = f' <a class="why" href="#about-{key}" aria-label="Explain: {title}">explain</a>' if chart.explanation else ""
    return (
        f'<figure id="chart-{key}"><figcaption><strong>{title}</strong>'
        f'<span class="unit">{said(chart.unit)}</span>{why}{note}</figcaption><div class="plot"></div></figure>'
    )


def explanations_section(report: Report) -> str:
    """Renders an entry of the metric dictionary for each chart, which the chart links to."""
    explained = [chart for chart in report.charts if chart.explanation]
    if not explained:
        return ""
    entries = "\n".join(_explanation(chart) for chart in explained if not chart.other)
    others = "\n".join(_explanation(chart) for chart in explained if chart.other)
    others = others and f'<summary>Other metrics</summary><div class="entries">{others}</div>'
    folded = others and f'<details class="others">{others}</details>'
    return f"""<section id="explained" aria-labelledby="explained-title">
<h2 id="explained-title">Metrics explained</h2>
<div class="entries">
{entries}
</div>
{folded}
</section>"""


def _explanation(chart: Chart) -> str:
    entry = chart.explanation
    assert entry is not None
    engines = ", ".join(f"{engine}: {name}" for engine, name in sorted(entry.elsewhere.items()))
    parts = {
        "definition": entry.formula, "unit": entry.unit, "healthy": entry.healthy, "direction": entry.direction,
        "action": entry.action, "logged as": engines,
    }  # fmt: skip
    lines = "".join(f"<div><dt>{name}</dt><dd>{said(text)}</dd></div>" for name, text in parts.items() if text)
    key = escape(chart.key)
    return (
        f'<article id="about-{key}" class="entry"><h3>{said(chart.title, 200)}</h3><dl>{lines}</dl>'
        f'<p><a href="#chart-{key}">Back to the chart</a></p></article>'
    )


def tokens_section(report: Report, runs: list[dict[str, Any]]) -> str:
    """Renders counts, legend, and the frames of the scatter plots."""
    there = [index for index, tokens in enumerate(report.tokens) if tokens is not None]
    known = [index for index in range(len(runs)) if index in there or report.shown[index].listed]
    picker = ""
    if len(known) > 1:
        options = "".join(
            f'<option value="{index}">{letter(index)} {said(runs[index]["label"])}</option>' for index in known
        )
        picker = (
            '<div class="bar"><label for="run">Tokens and completions of run</label>'
            f'<select id="run" autocomplete="off">{options}</select></div>'
        )
    if not there:
        return f"""<section id="tokens" aria-labelledby="tokens-title">
<h2 id="tokens-title">Tokens</h2>
<p class="hint">{"These runs have" if len(runs) > 1 else "This run has"} no token records. With records, this page shows
each token's ratio and probability gap, and the region's verdict on it in the text.</p>
{picker}
</section>"""
    counts = "".join(
        _counted(index, report.runs[index].run, tokens)
        for index in there
        if (tokens := report.tokens[index]) is not None
    )
    without = "".join(
        f'<p class="hint" data-run="{index}">{said(runs[index]["label"])} has no token records.</p>'
        for index in known
        if index not in there
    )
    tables = "".join(
        _most_stopped(index, runs[index]["tokens"]) for index in there if runs[index]["tokens"]["verdicts"]
    )
    return f"""<section id="tokens" aria-labelledby="tokens-title">
<h2 id="tokens-title">Tokens</h2>
{picker}
{counts}{without}
{_legend(report, there)}
<div class="scatters">
<figure id="scatter-ratio"><figcaption></figcaption></figure>
<figure id="scatter-gap"><figcaption></figcaption></figure>
</div>
{tables}
</section>"""


def _legend(report: Report, there: list[int]) -> str:
    decided = [tokens for tokens in report.tokens if tokens is not None and tokens.verdicts]
    if not decided:
        return ""
    entries = "".join(
        f'<li><canvas class="shape" data-code="{code}" aria-hidden="true"></canvas>'
        f"<span><b>{LABELS[name]}</b> {MEANINGS[name]}</span></li>"
        for code, name in enumerate(VERDICTS)
        if name != "not finite"  # it cannot be plotted
        and (name in ("kept", "stopped") or any(tokens.verdicts[name] for tokens in decided))
    )
    if any(edge_of(report.runs[index]) for index in there):
        entries += f"<li>{_EDGE}<span><b>threshold</b> where the region begins to act</span></li>"
    return f'<ul class="legend" aria-label="Legend">{entries}</ul>'


def _counted(index: int, run: Run, tokens: TokenSample) -> str:
    counts = {name: count for name, count in tokens.verdicts.items() if count}
    shares = [
        f"{percent(count / tokens.num_signed)} {LABELS[name]}"
        for name, count in counts.items()
        if name in WITH_GRADIENT
    ]
    others = [f"{count:,} {name}" for name, count in counts.items() if name not in WITH_GRADIENT]
    parts = ", ".join([*shares, *others]) or "no region decided on them"
    read = "" if tokens.num_read == tokens.num_rows else f" ({tokens.num_read:,} of them read)"
    drawn = len(tokens.points["mu"])
    sample = (
        "The plots show all of them." if drawn == tokens.num_read else f"The plots show a random sample of {drawn:,}."
    )
    dumps = f" Recorded in full: {', '.join(_dumped(run, dump) for dump in tokens.dumps)}." if tokens.dumps else ""
    return (
        f'<p class="hint" data-run="{index}">{said(run.name)}: {tokens.num_rows:,} recorded tokens × updates{read}, '
        f"{tokens.num_signed:,} with A ≠ 0: {parts}. {sample}{dumps}</p>"
    )


def _dumped(run: Run, dump: dict[str, Any]) -> str:
    step = dump["step"]
    causes = []
    for cause in dump["causes"]:
        trigger, values = cause.get("trigger"), cause.get("found")
        kind = trigger.get("kind") if isinstance(trigger, dict) else "?"
        numbers = values.items() if isinstance(values, dict) else ()
        parts = [f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers]
        causes.append(", ".join([f"{kind}", *parts]))
    last = measured_step(run, step) if isinstance(step, int) else "?"
    return f"steps up to {last} ({said('; '.join(causes) or 'cause unknown')})"


def _most_stopped(index: int, tokens: dict[str, Any]) -> str:
    listed = tokens["most_stopped"]
    if not listed:
        return f'<p class="hint table" data-run="{index}">No recorded token was masked.</p>'
    rows = "".join(
        f'<tr><td class="token" title="{said(row["text"])}">'
        f'<button type="button" class="find" title="Search the completions for this token">{said(row["text"])}</button>'
        f"</td><td>{row['token_id']}</td><td>{row['stopped']:,}</td>"
        f"<td>{row['signed']:,}</td><td>{percent(row['stopped'] / row['signed'])}</td><td>{row['rising']:,}</td>"
        f"<td>{row['stopped'] - row['rising']:,}</td><td>{row['mu']:.3g}</td><td>{row['pi']:.3g}</td></tr>"
        for row in listed
    )
    heads = ("token", "id", "masked", "A ≠ 0", "share", "rose", "fell", "μ, mean", "π, mean")
    head = "".join(f'<th scope="col">{word}</th>' for word in heads)
    return f"""<div class="table" data-run="{index}"><h3 id="most-{index}">Most masked tokens</h3>
<div class="scroll" tabindex="0" role="region" aria-labelledby="most-{index}"><table>
<caption>Over all records. Shares are of tokens with A ≠ 0; means are over masked tokens.</caption>
<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"""


def completions_section(report: Report) -> str:
    """Renders the controls of the completions. The script fills in the completions."""
    if not any(shown.listed for shown in report.shown):
        return ""
    counts = "".join(
        f'<p class="hint" data-run="{index}">{_chosen(shown)}</p>'
        for index, shown in enumerate(report.shown)
        if shown.listed
    )
    return f"""<section id="text" aria-labelledby="text-title">
<h2 id="text-title">Completions</h2>
{counts}
<div class="bar" id="controls">
<span><label for="layout">Show</label> <select id="layout" autocomplete="off"><option value="groups">groups</option>
<option value="list">completions</option></select></span>
<span><label for="sort">first</label> <select id="sort" autocomplete="off"></select></span>
<span><label for="tint">Color</label> <select id="tint" autocomplete="off"></select></span>
<span><label for="search">Search</label> <input id="search" type="search" autocomplete="off" spellcheck="false"
placeholder="text or token"></span>
<label class="check"><input id="whole" type="checkbox" autocomplete="off"> whole tokens</label>
<output id="matches" for="search whole"></output></div>
<ul id="text-legend" class="legend" aria-label="Legend of the text"></ul>
<div id="sequences"></div>
<button id="more" type="button" hidden>Show more</button>
</section>"""


def _chosen(shown: ShownCompletions) -> str:
    rows = sum(each.columns is not None for each in shown.listed)
    numbers = f" {rows:,} have the numbers of each token: hover over it, or use the arrow keys." if rows else ""
    if len(shown.listed) == shown.num_known:
        return f"All {shown.num_known:,} recorded completions.{numbers}"
    how = "the worst by each measure, with their groups, and a random sample"
    return f"{len(shown.listed):,} of {shown.num_known:,} recorded completions: {how}.{numbers}"
