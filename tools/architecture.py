"""The picture of docs/architecture.md, drawn from the imports themselves.

python tools/architecture.py    writes docs/figures/architecture.svg again

A row is a package; the order is that of the layers in pyproject.toml, which `lint-imports` enforces. A line leads from
a package down to one that it imports. An import that follows from others (a imports b, b imports c, and a imports c) is
left out. Packages that touch are one layer: they do not import each other.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/figures/architecture.svg"

BANDS = {
    "Commands and tools": {
        "cli": "one file per verb, imported when called",
        "report": "run folders → a summary, or one offline page",
        "explain": "a run's folder → why it went wrong, or nothing",
        "runner": "a recipe → an engine's settings → a run's folder",
        "conformance": "anyone's policy loss against known answers",
        "doctor": "this machine → findings",
        "probe": "sampler and trainer on the same tokens",
    },
    "Somebody else's trainer": {
        "engines": "TRL, verl, SkyRL, vLLM: seams; the rest borrowed",
    },
    "A small world to train in": {
        "models": "tiny models made here, SmolLM2 from PyPI",
        "tasks": "problems with rewards",
    },
    "Tokens on disk": {
        "audit": "recorded tokens → what other regions would do",
        "recording": "tokens and verdicts → Parquet, and back",
    },
    "The core: tensors in, tensors out": {
        "objective": "policy_loss, the one call",
        "build": "settings → function; the registry of regions",
        "checking": "trustrl.check: faults of value, before a step",
        "losses": "one number per token, 0 where inactive",
        "reductions": "tokens → one number, against global counts",
        "diagnostics": "sums that add over ranks → rates",
        "metrics": "the dictionary: formula, unit, what to do",
        "regions": "the verdict: mask, clip, sequence, project",
        "divergences": "how far two policies are apart: an interval",
        "tokens": "records → clean, blanked, float64 tokens",
        "cells": "the ids a region reads, and faults among them",
        "records": "the data that flows in, checked here",
        "numerics": "log1mexp and others that do not cancel",
        "sampling": "how log-probs were made; may they be compared",
        "vocabulary": "token_logprobs: the checked front of kernels",
    },
    "Settings: no torch": {
        "config": "what a user may choose: frozen dataclasses",
        "registry": "names that refuse to be overwritten",
        "packages": "optional packages, asked for by name",
        "errors": "one root, sentences that say what to do",
    },
    "Kernels: torch alone": {
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
    """The line down to one package, which everybody who imports it joins."""

    target: str
    importers: list[str]
    column: int


def layers() -> list[list[str]]:
    """The packages of each layer, from the one that may import all others down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("trustrl.") for name in layer.split("|")] for layer in found]


def imports(source: Path = ROOT / "src/trustrl") -> dict[str, set[str]]:
    """What each package or module directly in trustrl imports of the others, at any place in its files."""
    found: dict[str, set[str]] = {}
    for file in sorted(source.rglob("*.py")):
        package = file.relative_to(source).with_suffix("").parts[0]
        if package != "__init__":  # which only names where everything is
            found.setdefault(package, set()).update(_imported(file))
    return {package: (names & set(found)) - {package} for package, names in found.items()}


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "trustrl" and len(parts) > 1:
                yield parts[1]


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same without what follows from the rest."""

    @cache
    def reached(package: str) -> set[str]:
        return set().union(graph[package], *(reached(one) for one in graph[package]))

    return {
        package: {one for one in direct if not any(one in reached(other) for other in direct)}
        for package, direct in graph.items()
    }


def lanes(graph: Mapping[str, set[str]], row: Mapping[str, int]) -> list[Lane]:
    """One lane for each imported package; short ones next to the boxes, and no two on top of each other."""
    by_target = {one: sorted((a for a in graph if one in graph[a]), key=row.__getitem__) for one in graph}
    wanted = sorted((row[target] - row[who[0]], row[target], target) for target, who in by_target.items() if who)
    taken: list[list[tuple[int, int]]] = []
    placed = []
    for length, end, target in wanted:
        span = (end - length, end)
        free = (at for at, spans in enumerate(taken) if all(span[1] <= a or b <= span[0] for a, b in spans))
        column = next(free, len(taken))
        if column == len(taken):
            taken.append([])
        taken[column].append(span)
        placed.append(Lane(target, by_target[target], column))
    return placed


def draw() -> str:
    """The picture as SVG."""
    graph = imports()
    stack = layers()
    order = [package for layer in stack for package in layer]
    last_of_layer = {layer[-1] for layer in stack}
    if sorted(order) != sorted(graph) or sorted(ABOUT) != sorted(graph):
        raise SystemExit("Every package must be in a layer of pyproject.toml and in BANDS here, and in no other place.")
    row = {package: at for at, package in enumerate(order)}
    band = {package: at for at, packages in enumerate(BANDS.values()) for package in packages}
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
        f'aria-label="The packages of trustrl in their layers, and who imports whom">\n'
        f'<style>{STYLE}</style>\n<rect class="paper" {size}/>\n{body}\n</svg>\n'
    )


def _box(package: str, imported: set[str], band: int, left: int, y: int) -> str:
    """A package: its name, what it is, and all it imports when the pointer rests on it."""
    says = f"{package} imports {', '.join(sorted(imported))}" if imported else f"{package} imports nothing of trustrl"
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
    """Down the lane and into its package, with a dot wherever somebody joins."""
    x, top, end = _x(lane.column, left), tops[lane.importers[0]] + 27, tops[lane.target] + 11
    dots = "".join(f'<circle class="mark" cx="{x}" cy="{tops[package] + 27}" r="2.6"/>' for package in lane.importers)
    head = f'<path class="mark" d="M{left} {end}l-7 -3.5v7z"/>'
    return f'<g class="b{band}"><path class="line" d="M{x} {top}V{end}H{left - 5}"/>{dots}{head}</g>'


def _stub(package: str, placed: list[Lane], tops: Mapping[str, int], left: int, band: int) -> str:
    """From a package's box to the farthest lane that it joins."""
    joined = [lane.column for lane in placed if package in lane.importers]
    if not joined:
        return ""
    return f'<path class="line b{band}" d="M{left} {tops[package] + 27}H{_x(max(joined), left)}" stroke-opacity=".5"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
