"""Self-contained HTML page that makes no requests and never executes text from a model.

The content security policy lists the page's style and script by hash. Everything else is data or escaped text. The
script builds elements and sets their text, and the policy blocks strings as HTML.

lines.js and scatter.js draw the charts, in 23 kB. uPlot would add about 50 kB to each page by its README, and bands,
marks, tables and keys would still be scripts of this page.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files

import trustrl
from trustrl.tools.report.cause_section import causes_section
from trustrl.tools.report.html_sections import (
    completions_section,
    curves_section,
    explanations_section,
    runs_section,
    tokens_section,
)
from trustrl.tools.report.page_data import page_data
from trustrl.tools.report.report_contents import Report, summary_of
from trustrl.tools.report.safe_text import embedded, said

SCRIPTS = ("base.js", "lines.js", "scatter.js", "cards.js", "completions.js", "main.js")


def page(report: Report, *, reload_seconds: float | None = None) -> str:
    """Renders the report as an HTML page.

    Args:
        report: The report.
        reload_seconds: Interval at which the page loads its own file again, or None if it never does.
    """
    style = _asset("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, SCRIPTS)) + "})();"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    title = said(report.runs[0].run.name) if len(report.runs) == 1 else f"{len(report.runs)} runs compared"
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
{_live(reload_seconds)}
</header>
<main>
{causes_section(report, summary["runs"])}
{curves_section(report)}
{tokens_section(report, summary["runs"])}
{completions_section(report)}
{runs_section(summary["runs"])}
{explanations_section(report)}
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


def _navigation(report: Report) -> str:
    links = [("causes", "Causes"), ("curves", "Curves"), ("tokens", "Tokens")]
    if any(shown.listed for shown in report.shown):
        links.append(("text", "Completions"))
    links.append(("runs", "Settings"))
    if any(chart.explanation for chart in report.charts):
        links.append(("explained", "Metrics explained"))
    items = "".join(f'<li><a href="#{anchor}">{word}</a></li>' for anchor, word in links)
    return f'<nav aria-label="Sections of this page"><ul>{items}</ul></nav>'


def _live(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f'<p class="live" id="live" data-seconds="{seconds:g}"><span class="dot" aria-hidden="true"></span>'
        f'<span id="live-state">Live: reloads every {seconds:g} s.</span> '
        '<button id="live-pause" type="button">Pause</button></p>'
    )
