"""The tables of docs/engines/index.md, written from the catalogue of engines.

python scripts/engine_tables.py    writes them between the markers of the page
"""

import re
from pathlib import Path

from engine_evidence import TESTED, samplers_of, status, strongest_test, trains

import trustrl
from trustrl import regions
from trustrl.engines.catalogue import ENGINES, Engine, kind_of, supports

PAGE = Path(__file__).parents[1] / "docs/engines/index.md"
COLUMNS = {"sampled": "sampled token", "topk": "Top-K", "exact": "exact", "projection": "Top-K gradient"}
ANCHORS = {"behavior": "μ", "proximal": "π'"}


def engines() -> str:
    """Returns the table with one row per engine."""
    lines = [
        f"| engine | versions | {' | '.join(COLUMNS.values())} | log-probs | tests | session |",
        f"|---|---|{'---|' * len(COLUMNS)}---|---|---|",
    ]
    for engine in ENGINES:
        marks = " | ".join("yes" if kind in engine.kinds else "-" for kind in COLUMNS)
        between = ", " if engine.both_at_once else " or "
        anchors = between.join(mark for anchor, mark in ANCHORS.items() if anchor in engine.anchors)
        lines.append(
            f"| [{engine.name}]({engine.page}) | {', '.join(engine.versions)} | {marks} | {anchors} | "
            f"{TESTED[strongest_test(engine)]} | `{engine.session}` |"
        )
    return "\n".join(lines)


def samplers() -> str:
    """Returns the table of what ran, by sampler and anchor. Engines and anchors with the same cells share a row."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for engine in ENGINES:
        for sampler in samplers_of(engine):
            for anchor, mark in ANCHORS.items():
                cells = " | ".join(status(engine, kind, sampler, anchor) for kind in COLUMNS)
                row = rows.setdefault((sampler, cells), {})
                row.setdefault(f"[{engine.name}]({engine.page})", []).append(mark)
    lines = [f"| engine | sampler | anchor | {' | '.join(COLUMNS.values())} |", f"|---|---|---|{'---|' * len(COLUMNS)}"]
    for (sampler, cells), marks in rows.items():
        for anchors in dict.fromkeys(map(", ".join, marks.values())):
            names = [name for name, of_engine in marks.items() if ", ".join(of_engine) == anchors]
            lines.append(f"| {', '.join(names)} | {sampler} | {anchors} | {cells} |")
    return "\n".join(lines)


def trained() -> str:
    """Returns the list of the engines that took optimizer steps with each kind of region."""
    lines = []
    for kind, column in COLUMNS.items():
        names = [engine.name for engine in ENGINES if trains(engine, kind)]
        lines.append(f"- {column}: {', '.join(names)} ({len(names)})")
    return "\n".join(lines)


def starts() -> str:
    """Returns the table of the lines that choose a region."""
    rows = [f"| [{engine.name}]({engine.page}) | `{engine.start}` |" for engine in ENGINES]
    return "\n".join(["| engine | line |", "|---|---|", *rows])


def presets() -> str:
    """Returns the table of presets. Those that read the same and run on the same engines share a row."""
    rows: dict[str, list[str]] = {}
    for name in trustrl.presets():
        region = trustrl.preset(name)
        anchors = ", ".join(mark for anchor, mark in ANCHORS.items() if anchor in region.needs().anchors)
        rows.setdefault(f"{COLUMNS[kind_of(region)]} | {anchors} | {listed(region)}", []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    return "\n".join(["| presets | read | log-probs | engines |", "|---|---|---|---|", *lines])


def listed(region: regions.Region) -> str:
    """Returns the engines of a region, or the exceptions if they are fewer."""
    ran: list[Engine] = [engine for engine in ENGINES if supports(engine, region)]
    left_out = [engine.name for engine in ENGINES if engine not in ran]
    if not left_out:
        return "all"
    if len(left_out) < len(ran):
        return f"all but {', '.join(left_out)}"
    return ", ".join(engine.name for engine in ran)


TABLES = {"engines": engines, "samplers": samplers, "trained": trained, "starts": starts, "presets": presets}


def page() -> str:
    """Returns the page with its tables written again.

    Raises:
        SystemExit: If the page lacks a table's markers.
    """
    text = PAGE.read_text()
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin (python scripts/engine_tables.py) -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{PAGE} must contain {begin!r} and {end!r}, where the table goes.")
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", f"{begin}\n{table()}\n{end}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
