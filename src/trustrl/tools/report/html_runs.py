"""Section of the page that describes the runs: outcome, region, settings, and the files behind the report."""

from html import escape
from typing import Any

from trustrl.tools.report.region_descriptions import FACT_LABELS
from trustrl.tools.report.safe_text import said, visible
from trustrl.tools.report.terminal_text import percent

DASHES, COLOURS = 6, 8
NO_REGION = "No trustrl region: the engine's own loss trained this run."


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
<h2 id="runs-title">{"Runs" if len(runs) > 1 else "Run"}</h2>
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
    head = f"<h3>{swatch(index)}{letter(index)}&ensp;{said(run['label'])}</h3>" if several else ""
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
<div class="verdict">{_accuracy(run)}{_badges(run)}</div>
<p class="region">{said(run["region"] or NO_REGION)}</p>
{_facts(shown)}
{notes}{words if run["last_words"] else ""}
{_sources(run, opened=bool(run["missing"]) and not several)}
</article>"""


def _accuracy(run: dict[str, Any]) -> str:
    if run["accuracy_before"] is None:
        return '<span class="what">held-out accuracy was not measured</span>'
    before, after, what = percent(run["accuracy_before"]), "", "held-out accuracy, before training"
    if run["accuracy_after"] is not None:
        after, what = f" → {percent(run['accuracy_after'])}", "held-out accuracy, before → after"
    return f'<span class="figure">{before}{after}</span><span class="what">{what}</span>'


def _badges(run: dict[str, Any]) -> str:
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
