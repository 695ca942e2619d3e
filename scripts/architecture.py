"""Picture of the import layers for docs/architecture.md, drawn from the imports in the source.

python scripts/architecture.py    writes docs/figures/architecture.svg again

A row is a package or module of trustrl, or a module of `trustrl.core`. The order of the rows is that of the layers in
pyproject.toml, which `lint-imports` enforces. A line leads from a row down to one that it imports. The picture omits an
import that follows from others (a imports b, b imports c, and a imports c). Rows that touch form one layer: they do not
import each other.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/figures/architecture.svg"

OPENED = "core"
"""Package whose modules are rows."""

BANDS = {
    "Commands, tools and runs": {
        "cli": "one file per verb, imported when called",
        "tools": "audit, bound, calibrate, conformance, ...",
        "runner": "recipe → engine command → run directory",
        "runs": "runs of any trainer or tracker as plain data",
    },
    "Adapters for trainers": {
        "engines": "TRL, verl, SkyRL and vLLM",
    },
    "A small world to train in": {
        "world": "tiny models, SmolLM2, problems with rewards",
    },
    "Tokens on disk": {
        "recording": "tokens and decisions → Parquet, and back",
    },
    "The core: tensors in, tensors out": {
        "functional": "losses and projections as plain functions",
        "regions": "one file per region: settings → decision",
        "core.fused_loss": "loss from hidden states, block by block",
        "core.ops": "operations that regions are written with",
        "core.policy_loss": "the call that a trainer makes",
        "core.impl": "eager, Triton, compiled: the same functions",
        "core.check": "raises on faulty values before a step",
        "core.losses": "one term per token → one number, by global counts",
        "core.diagnostics": "sums that add over ranks → rates",
        "core.eager_sums": "those sums in torch, written from the table",
        "core.metrics": "metric dictionary, and the core of it",
        "core.metric_entries": "one metric: formula, unit, advice",
        "core.sum_table": "one sum: expression, unit, reduction; bins",
        "core.decision": "a region's decision, corrections, rules for all",
        "core.projection": "projection onto a KL ball, differentiable",
        "core.divergences": "distance of two policies, as an interval",
        "core.clean": "records → clean tokens in float64",
        "core.sequences": "means, maxima and sums over sequences",
        "core.partition": "the ids that a region reads, and the rest",
        "core.records": "input tokens of sampler and policy, checked",
        "core.numerics": "log1mexp and others that do not cancel",
        "core.sampling": "how a sampler made its log-probs",
        "core.token_logprobs": "hidden states → log-probs; checks inputs",
        "core.vocabulary_impl": "chunked or Triton; checks the first batch",
    },
    "Settings: no torch": {
        "config": "frozen dataclasses: statistics, terms, needs",
        "registry": "names that cannot be overwritten",
        "optional_imports": "imports optional packages on first use",
        "files": "bounded reading, atomic writing",
        "limits": "memory and time that reading may take",
        "terminal": "terminal lines, with hidden characters escaped",
        "errors": "exceptions with one common base class",
    },
    "Kernels: torch only": {
        "kernels": "hidden states and head → log-probs, in tiles",
    },
}
ABOUT = {package: what for packages in BANDS.values() for package, what in packages.items()}

WIDTH, ROW, HEADING = 440, 38, 28
GAP, GAP_IN_LAYER = 8, 1
LANE, FIRST_LANE = 9, 14

STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --edge: #d0d7de; --box: #f6f8fa; }
.b0 { --hue: #8250df; } .b1 { --hue: #bf3989; } .b2 { --hue: #9a6700; } .b3 { --hue: #1a7f37; }
.b4 { --hue: #0969da; } .b5 { --hue: #57606a; } .b6 { --hue: #bc4c00; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --edge: #30363d; --box: #161b22; }
  .b0 { --hue: #a371f7; } .b1 { --hue: #f778ba; } .b2 { --hue: #d29922; } .b3 { --hue: #3fb950; }
  .b4 { --hue: #58a6ff; } .b5 { --hue: #9da7b3; } .b6 { --hue: #f0883e; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--edge); } .mark { fill: var(--hue); }
.band { font-size: 12px; font-weight: 600; fill: var(--hue); } .name { font-size: 14px; font-weight: 600; }
.what { font-size: 12px; fill: var(--soft); } .line { fill: none; stroke: var(--hue); stroke-width: 1.5; }
"""


class Lane(NamedTuple):
    """Line down to one row, which every row that imports it joins."""

    target: str
    importers: list[str]
    column: int


def layers() -> list[list[str]]:
    """Returns the rows of each layer, from the one that may import all others down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, inner, *_ = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows_by_layer: list[list[str]] = []
    for layer in outer:
        rows = [name.strip().removeprefix("trustrl.") for name in layer.split("|")]
        if rows == [OPENED]:
            rows_by_layer += [[f"{OPENED}.{name.strip()}" for name in within.split("|")] for within in inner]
        else:
            rows_by_layer.append(rows)
    return rows_by_layer


def imports(source: Path = ROOT / "src/trustrl") -> dict[str, set[str]]:
    """Returns the rows that each row imports, at any place in its files."""
    graph: dict[str, set[str]] = {}
    for file in sorted(source.rglob("*.py")):
        row = _row(file.relative_to(source).with_suffix("").parts)
        if row.rpartition(".")[2] not in ("__init__", "__main__"):  # they only name where everything is
            graph.setdefault(row, set()).update(_imported(file))
    return {row: (names & set(graph)) - {row} for row, names in graph.items()}


def _row(parts: Sequence[str]) -> str:
    """Returns the row of a module, given the parts of its name below trustrl."""
    return ".".join(parts[: 2 if parts[0] == OPENED else 1])


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "trustrl" and len(parts) > 1:
                yield _row(parts[1:])


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Removes the imports that follow from others."""

    @cache
    def reached(package: str) -> set[str]:
        return set().union(graph[package], *(reached(name) for name in graph[package]))

    return {
        package: {name for name in direct if not any(name in reached(other) for other in direct)}
        for package, direct in graph.items()
    }


def lanes(graph: Mapping[str, set[str]], row: Mapping[str, int]) -> list[Lane]:
    """Places one lane for each imported row: short lanes next to the boxes, and no two on top of each other."""
    by_target = {name: sorted((a for a in graph if name in graph[a]), key=row.__getitem__) for name in graph}
    wanted = sorted((row[target] - row[who[0]], row[target], target) for target, who in by_target.items() if who)
    taken: list[list[tuple[int, int]]] = []
    placed = []
    for length, end, target in wanted:
        span = (end - length, end)
        free = (column for column, spans in enumerate(taken) if all(span[1] <= a or b <= span[0] for a, b in spans))
        column = next(free, len(taken))
        if column == len(taken):
            taken.append([])
        taken[column].append(span)
        placed.append(Lane(target, by_target[target], column))
    return placed


def draw() -> str:
    """Returns the picture as SVG."""
    graph = imports()
    stack = layers()
    order = [package for layer in stack for package in layer]
    last_of_layer = {layer[-1] for layer in stack}
    if sorted(order) != sorted(graph) or sorted(ABOUT) != sorted(graph):
        raise SystemExit("Every row must be in a layer of pyproject.toml and in BANDS of scripts/architecture.py.")
    row = {package: place for place, package in enumerate(order)}
    band = {package: place for place, packages in enumerate(BANDS.values()) for package in packages}
    placed = lanes(reduced(graph), row)
    left = FIRST_LANE + LANE * (max(lane.column for lane in placed) + 1)

    parts, tops, y = [], {}, 12
    for package in order:
        if row[package] == 0 or band[package] != band[order[row[package] - 1]]:
            y += HEADING - GAP
            title = list(BANDS)[band[package]]
            parts.append(f'<text class="band b{band[package]}" x="{left}" y="{y - 4}">{escape(title)}</text>')
        tops[package] = y
        parts.append(_box(package, graph[package], band[package], left, y))
        y += ROW + (GAP if package in last_of_layer else GAP_IN_LAYER)
    lines = [_line(lane, band[lane.target], tops, left) for lane in placed]
    stubs = [_stub(package, placed, tops, left, band[package]) for package in order]
    body = "\n".join(part for part in [*stubs, *lines, *parts] if part)
    size = f'width="{WIDTH}" height="{y + 6}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" {size} role="img" '
        f'aria-label="The packages of trustrl in their layers, and the imports between them">\n'
        f'<style>{STYLE}</style>\n<rect class="paper" {size}/>\n{body}\n</svg>\n'
    )


def _box(package: str, imported: set[str], band: int, left: int, y: int) -> str:
    """Returns the box of a row: its name, its purpose, and a tooltip with all its imports."""
    says = f"{package} imports {', '.join(sorted(imported))}" if imported else f"{package} imports nothing from trustrl"
    return (
        f'<g class="b{band}"><title>{says}</title>'
        f'<rect class="box" x="{left}" y="{y}" width="{WIDTH - left - 10}" height="{ROW}" rx="4"/>'
        f'<rect class="mark" x="{left}" y="{y}" width="4" height="{ROW}" rx="2"/>'
        f'<text class="name" x="{left + 14}" y="{y + 16}">{package}</text>'
        f'<text class="what" x="{left + 14}" y="{y + 31}">{escape(ABOUT[package])}</text></g>'
    )


def _x(column: int, left: int) -> int:
    return left - 8 - LANE * (column + 1)


def _line(lane: Lane, band: int, tops: Mapping[str, int], left: int) -> str:
    """Returns the line down a lane and into its row, with a dot for each importer."""
    x, top, end = _x(lane.column, left), tops[lane.importers[0]] + 27, tops[lane.target] + 11
    dots = "".join(f'<circle class="mark" cx="{x}" cy="{tops[package] + 27}" r="2.6"/>' for package in lane.importers)
    head = f'<path class="mark" d="M{left} {end}l-7 -3.5v7z"/>'
    return f'<g class="b{band}"><path class="line" d="M{x} {top}V{end}H{left - 5}"/>{dots}{head}</g>'


def _stub(package: str, placed: list[Lane], tops: Mapping[str, int], left: int, band: int) -> str:
    """Returns the line from a row's box to the farthest lane that it joins."""
    joined = [lane.column for lane in placed if package in lane.importers]
    if not joined:
        return ""
    return f'<path class="line b{band}" d="M{left} {tops[package] + 27}H{_x(max(joined), left)}" stroke-opacity=".5"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
