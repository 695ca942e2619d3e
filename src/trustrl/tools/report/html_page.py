"""Self-contained HTML page that makes no requests and never executes text from a model.

The content security policy lists the page's style and script by hash. Everything else is data or escaped text. The
script builds elements and sets their text, and the policy blocks strings as HTML.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import trustrl
from trustrl.tools.report.charts import Chart
from trustrl.tools.report.recorded_actions import LABELS, MEANINGS, VERDICTS, WITH_GRADIENT
from trustrl.tools.report.region_descriptions import FACT_LABELS
from trustrl.tools.report.report_contents import Report, edge_of, measured_step, page_data, summary_of
from trustrl.tools.report.run_folders import Run
from trustrl.tools.report.safe_text import embedded, visible
from trustrl.tools.report.terminal_text import percent
from trustrl.tools.report.token_sample import TokenSample

SCRIPTS = ("base.js", "lines.js", "scatter.js", "text.js", "main.js")
DASHES, COLOURS = 6, 8
_EDGE = '<svg width="24" height="14" aria-hidden="true"><path class="edge" d="M1 7H23"/></svg>'


def page(report: Report) -> str:
    """Renders the report as an HTML page."""
    style = _asset("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "})();"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    title = _title(report)
    summary = summary_of(report)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title} – trustrl report</title>
<style>{style}</style>
</head>
<body>
<div class="page">
<header>
<p class="eyebrow">trustrl report</p>
<h1>{title}</h1>
{_navigation(report)}
</header>
<main>
{_runs(summary["runs"])}
{_curves(report)}
{_tokens(report, summary["runs"])}
</main>
<footer><p>Made by trustrl {escape(trustrl.__version__)}. {escape(summary["collapsed_means"])}
μ is the sampler's policy, π' the trainer's policy at the rollout, and π the policy being trained.</p></footer>
</div>
<div id="tip" class="tip" role="tooltip" hidden></div>
<script type="application/json" id="data">{embedded(page_data(report))}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("trustrl.tools.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _said(text: Any, longest: int = 500) -> str:
    """Escapes untrusted text for HTML."""
    return escape(visible(str(text), longest))


def _title(report: Report) -> str:
    first, *others = report.runs
    return _said(first.name) if not others else f"{len(report.runs)} runs compared"


def _navigation(report: Report) -> str:
    links = [("runs", "Runs" if len(report.runs) > 1 else "Run"), ("curves", "Curves")]
    if any(report.tokens):
        links += [("tokens", "Tokens"), ("text", "Text")]
    items = "".join(f'<li><a href="#{at}">{word}</a></li>' for at, word in links)
    return f'<nav aria-label="Sections of this page"><ul>{items}</ul></nav>'


def swatch(run: int) -> str:
    """Returns the run's line style as an SVG swatch."""
    dash = (run + run // COLOURS) % DASHES
    return (
        f'<svg width="34" height="10" aria-hidden="true" class="c{run % COLOURS}">'
        f'<path class="run d{dash}" d="M2 5H32"/></svg>'
    )


def letter(run: int) -> str:
    """Returns the run's letter in charts."""
    return chr(65 + run) if run < 26 else f"R{run + 1}"


def _runs(runs: list[dict[str, Any]]) -> str:
    shared = {
        name: value for name, value in runs[0]["facts"].items() if all(one["facts"].get(name) == value for one in runs)
    }
    cards = "\n".join(
        _card(at, run, shared if len(runs) > 1 else {}, several=len(runs) > 1) for at, run in enumerate(runs)
    )
    in_all = f"<h3>Common to all runs</h3>{_facts(shared)}" if len(runs) > 1 and shared else ""
    return f"""<section id="runs" aria-labelledby="runs-title">
<h2 id="runs-title">{"Runs" if len(runs) > 1 else "Run"}</h2>
<div class="cards{"" if len(runs) > 1 else " one"}">
{cards}
</div>
<div class="shared">{in_all}</div>
</section>"""


def _facts(shown: dict[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{escape(FACT_LABELS.get(name, name))}</dt><dd>{_said(value)}</dd></div>"
        for name, value in shown.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _card(at: int, run: dict[str, Any], shared: dict[str, str], *, several: bool) -> str:
    head = f"<h3>{swatch(at)}{letter(at)}&ensp;{_said(run['label'])}</h3>" if several else ""
    shown = {name: value for name, value in run["facts"].items() if name not in shared}
    steps = f"{run['steps']}" if run["steps_planned"] is None else f"{run['steps']} of {run['steps_planned']}"
    shown |= {"steps": steps, "rollouts": str(run["rollouts"])}
    if run["reward_first"] is not None:
        first, best, last = (f"{run[f'reward_{part}']:.2f}" for part in ("first", "best", "last"))
        shown["reward, first → best → last"] = f"{first} → {best} → {last}"
    for key, word in (("masked_share", "masked, mean over steps"), ("projected_share", "projected, mean over steps")):
        if run[key] is not None:
            shown[word] = percent(run[key])
    if run["seconds"] is not None:
        shown["time"] = f"{run['seconds']:,.0f} s"
    notes = "".join(f'<p class="note">{_said(note)}</p>' for note in run["notes"])
    words = f"<pre>{escape(chr(10).join(visible(x, 300) for x in run['last_words'].splitlines()))}</pre>"
    return f"""<article class="card">
{head}
<div class="verdict">{_accuracy(run)}{_badges(run)}</div>
<p class="region">{_said(run["region"])}</p>
{_facts(shown)}
{notes}{words if run["last_words"] else ""}
</article>"""


def _accuracy(run: dict[str, Any]) -> str:
    if run["accuracy_before"] is None:
        return '<span class="what">held-out accuracy was not measured</span>'
    before, after, what = percent(run["accuracy_before"]), "", "held-out accuracy, before training"
    if run["accuracy_after"] is not None:
        after, what = f" → {percent(run['accuracy_after'])}", "held-out accuracy, before → after"
    return f'<span class="figure">{before}{after}</span><span class="what">{what}</span>'


def _badges(run: dict[str, Any]) -> str:
    kind = {"finished": "good", "failed": "bad", "unfinished": "open"}[run["status"]]
    planned = "" if run["steps_planned"] is None else f" of {run['steps_planned']}"
    status = "finished" if run["status"] == "finished" else f"{run['status']}, step {run['steps']}{planned}"
    collapsed = '<span class="badge bad">collapsed</span>' if run["collapsed"] else ""
    return f'<span class="badge {kind}">{escape(status)}</span>{collapsed}'


def _curves(report: Report) -> str:
    figures = "\n".join(map(_figure, report.charts)) or '<p class="hint">The run has no metrics yet.</p>'
    smooth = any(line.mean for chart in report.charts for line in chart.lines)
    hint = "Thick lines are means over a fiftieth of the run, faint lines are single steps. " if smooth else ""
    return f"""<section id="curves" aria-labelledby="curves-title">
<h2 id="curves-title">Curves</h2>
<p class="hint">{hint}Hover over a chart, or focus it and use the arrow keys, to read a step. ✕ marks a non-finite
value.</p>
<div class="grid">
{figures}
</div>
</section>"""


def _figure(chart: Chart) -> str:
    about = f'<span class="about">{_said(chart.about)}</span>' if chart.about else ""
    return (
        f'<figure id="chart-{escape(chart.key)}"><figcaption><strong>{escape(chart.title)}</strong>'
        f'<span class="unit">{escape(chart.unit)}</span>{about}</figcaption><div class="plot"></div></figure>'
    )


def _tokens(report: Report, runs: list[dict[str, Any]]) -> str:
    there = [at for at, tokens in enumerate(report.tokens) if tokens is not None]
    if not there:
        return """<section id="tokens" aria-labelledby="tokens-title">
<h2 id="tokens-title">Tokens</h2>
<p class="hint">These runs have no records. With records, this page shows each token's ratio and probability gap, and
what the region did to it in the text.</p>
</section>"""
    options = "".join(f'<option value="{at}">{letter(at)} {_said(runs[at]["label"])}</option>' for at in there)
    hidden = " hidden" if len(there) == 1 else ""
    counts = "".join(_counted(at, report.runs[at], tokens) for at in there if (tokens := report.tokens[at]) is not None)
    tables = "".join(_most_stopped(at, runs[at]["tokens"]) for at in there)
    known = [(code, name) for code, name in enumerate(VERDICTS) if _occurs(report, name)]
    legend = "".join(
        f'<li><canvas class="shape" data-code="{code}" aria-hidden="true"></canvas>'
        f"<span><b>{LABELS[name]}</b> {MEANINGS[name]}</span></li>"
        for code, name in known
        if name != "not finite"  # it cannot be plotted
    )
    if any(edge_of(report.runs[at]) for at in there):
        legend += f"<li>{_EDGE}<span><b>threshold</b> where the region begins to act</span></li>"
    samples = "".join(f'<li><span class="t v{code}">{LABELS[name]}</span></li>' for code, name in known)
    return f"""<section id="tokens" aria-labelledby="tokens-title">
<h2 id="tokens-title">Tokens</h2>
<div class="bar"{hidden}><label for="run">Tokens of run</label>
<select id="run" autocomplete="off">{options}</select></div>
{counts}
<ul class="legend" aria-label="Legend">{legend}</ul>
<div class="scatters">
<figure id="scatter-ratio"><figcaption></figcaption></figure>
<figure id="scatter-gap"><figcaption></figcaption></figure>
</div>
{tables}
</section>
<section id="text" aria-labelledby="text-title">
<h2 id="text-title">Text</h2>
<p class="hint">Completions with the most masked or reweighted tokens, each at the update that masked most. Hover over a
token, or focus a line and use the arrow keys, to see its numbers.</p>
<ul class="legend" aria-label="Legend of the text">{samples}</ul>
<div id="sequences"></div>
<button id="more" type="button" hidden>Show more</button>
</section>"""


def _occurs(report: Report, verdict: str) -> bool:
    return verdict in ("kept", "stopped") or any(tokens.verdicts[verdict] for tokens in report.tokens if tokens)


def _counted(at: int, run: Run, tokens: TokenSample) -> str:
    found = {name: count for name, count in tokens.verdicts.items() if count}
    shares = [
        f"{percent(count / tokens.num_signed)} {LABELS[name]}" for name, count in found.items() if name in WITH_GRADIENT
    ]
    others = [f"{count:,} {name}" for name, count in found.items() if name not in WITH_GRADIENT]
    read = "" if tokens.num_read == tokens.num_rows else f" ({tokens.num_read:,} of them read)"
    drawn = len(tokens.points["mu"])
    sample = (
        "The plots show all of them." if drawn == tokens.num_read else f"The plots show a random sample of {drawn:,}."
    )
    dumps = f" Recorded in full: {', '.join(_dumped(run, one) for one in tokens.dumps)}." if tokens.dumps else ""
    return (
        f'<p class="hint" data-run="{at}">{_said(run.label)}: {tokens.num_rows:,} recorded tokens × updates{read}, '
        f"{tokens.num_signed:,} with A ≠ 0: {', '.join([*shares, *others])}. {sample}{dumps}</p>"
    )


def _dumped(run: Run, dump: dict[str, Any]) -> str:
    step = dump["step"]
    causes = []
    for one in dump["causes"]:
        trigger, found = one.get("trigger"), one.get("found")
        kind = trigger.get("kind") if isinstance(trigger, dict) else "?"
        numbers = ", ".join(f"{key} {_short(value)}" for key, value in found.items()) if isinstance(found, dict) else ""
        causes.append(f"{kind}, {numbers}" if numbers else f"{kind}")
    last = measured_step(run, step) if isinstance(step, int) else "?"
    return f"steps up to {last} ({_said('; '.join(causes) or 'cause unknown')})"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _most_stopped(at: int, tokens: dict[str, Any]) -> str:
    listed = tokens["most_stopped"]
    if not listed:
        return f'<p class="hint table" data-run="{at}">No recorded token was masked.</p>'
    rows = "".join(
        f'<tr><td class="token" title="{_said(one["text"])}">{_said(one["text"])}</td>'
        f"<td>{one['token_id']}</td><td>{one['stopped']:,}</td>"
        f"<td>{one['signed']:,}</td><td>{percent(one['stopped'] / one['signed'])}</td><td>{one['rising']:,}</td>"
        f"<td>{one['stopped'] - one['rising']:,}</td><td>{one['mu']:.3g}</td><td>{one['pi']:.3g}</td></tr>"
        for one in listed
    )
    heads = ("token", "id", "masked", "A ≠ 0", "share", "rose", "fell", "μ, mean", "π, mean")
    head = "".join(f'<th scope="col">{word}</th>' for word in heads)
    return f"""<div class="table" data-run="{at}"><h3 id="most-{at}">Most masked tokens</h3>
<div class="scroll" tabindex="0" role="region" aria-labelledby="most-{at}"><table>
<caption>Over all records. Shares are of tokens with A ≠ 0; means are over masked tokens.</caption>
<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"""
