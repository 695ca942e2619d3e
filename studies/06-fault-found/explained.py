"""Diagnoses of `trustrl explain` for the runs of `seeded_runs.py`, compared with the seeded faults.

    python studies/06-fault-found/explained.py judge RUNS    # writes docs/data/explained-2.jsonl
    python studies/06-fault-found/explained.py page          # fills docs/results/fault-found.md from it

A run counts for the first cause that `explain` names. Every run that was started counts, whatever it shows.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from seeded_runs import RUNS, seed_of

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import fill

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/data/explained-2.jsonl", ROOT / "docs/results/fault-found.md"
TABLES = PAGE.with_stem("fault-found-tables")
HEALTHY, NOTHING, NO_METRICS = "healthy", "nothing", "no metrics"
KEPT = 2
"""Number of findings that a run's row names. Further findings are only counted."""

NORMAL = 1.959964
"""97.5% quantile of the normal distribution."""


def judge(runs: Path) -> list[dict[str, Any]]:
    """Returns one row for each run that was made, in the order of the list."""
    from trustrl.errors import TrustRLError
    from trustrl.tools.explain.explanation import explain

    rows = []
    for name, run in RUNS.items():
        done = runs / f"{name}.done"
        if not done.exists():
            continue
        try:
            found = explain(runs / name)
        except TrustRLError as error:
            causes, missing, accuracy, fault = [[NO_METRICS, 0.0]], [], [], str(error).replace(str(runs), "RUNS")
        else:
            causes = [[one.name, round(one.confidence, 2)] for one in found.causes]
            missing, fault = [one.what for one in found.unchecked], None
            accuracy = [round(row["accuracy"], 3) for row in found.run.evaluations if row.get("accuracy") is not None]
        rows.append(
            {
                "run": name, "seeded": run.cause or HEALTHY, "engine": run.engine, "fault": run.fault,
                "settings": list(run.settings), "seed": seed_of(name), **json.loads(done.read_text()),
                "accuracy": accuracy[:1] + accuracy[-1:] if len(accuracy) > 1 else accuracy, "found": causes,
                "unchecked": missing, "error": fault,
            }
        )  # fmt: skip
    return rows


def first(row: dict[str, Any]) -> str:
    """Returns the first named cause."""
    return row["found"][0][0] if row["found"] else NOTHING


def is_right(row: dict[str, Any]) -> bool:
    """Returns whether the first named cause is the seeded one, or nothing is named in a healthy run."""
    return first(row) == (NOTHING if row["seeded"] == HEALTHY else row["seeded"])


def matrix(rows: list[dict[str, Any]]) -> str:
    """Returns a table of seeded causes against first named causes."""
    seeded = [one for one in dict.fromkeys(run.cause or HEALTHY for run in RUNS.values()) if one != HEALTHY]
    counts = Counter((row["seeded"], first(row)) for row in rows)
    others = sorted({first(row) for row in rows} - {*seeded, NOTHING})
    columns = [*seeded, *others, NOTHING]
    lines = [f"| seeded ↓, named first → | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for cause in [*seeded, HEALTHY]:
        if not any(row["seeded"] == cause for row in rows):
            continue
        right = NOTHING if cause == HEALTHY else cause
        cells = [(f"**{counts[cause, one]}**" if one == right else f"{counts[cause, one] or ''}") for one in columns]
        lines.append(f"| {cause} | {' | '.join(cells)} |")
    return "\n".join(lines)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Returns the 95% Wilson interval of a share.

    Example:
        >>> tuple(round(end, 2) for end in wilson(9, 10))
        (0.6, 0.98)
    """
    share, square = right / count, NORMAL**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def shares(rows: list[dict[str, Any]]) -> str:
    """Returns a table of the shares that were right, by fault and engine, with their intervals."""
    engines = {
        "TRL": ("trl", "stock trl"),
        "verl": ("verl", "stock verl"),
        "both": ("trl", "stock trl", "verl", "stock verl"),
    }
    stock = {"with a region": ("trl", "verl"), "stock": ("stock trl", "stock verl")}
    kinds = [*dict.fromkeys(row["seeded"] for row in rows if row["seeded"] != HEALTHY)]
    lines = [f"| | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]

    def cell(chosen: list[dict[str, Any]]) -> str:
        if not chosen:
            return "–"
        right = sum(map(is_right, chosen))
        low, high = wilson(right, len(chosen))
        return f"{right} of {len(chosen)} ({low:.2f} to {high:.2f})"

    def line(name: str, chosen: list[dict[str, Any]]) -> None:
        cells = [cell([row for row in chosen if row["engine"] in of]) for of in engines.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    faulty = [row for row in rows if row["seeded"] != HEALTHY]
    for kind in kinds:
        line(kind, [row for row in faulty if row["seeded"] == kind])
    line("**all faults: named first**", faulty)
    line("**healthy: nothing named**", [row for row in rows if row["seeded"] == HEALTHY])
    for name, of in stock.items():
        line(f"all faults, {name}", [row for row in faulty if row["engine"] in of])
        line(f"healthy, {name}", [row for row in rows if row["seeded"] == HEALTHY and row["engine"] in of])
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns three sentences with the counts."""
    faulty = [row for row in rows if row["seeded"] != HEALTHY]
    healthy = [row for row in rows if row["seeded"] == HEALTHY]
    right = sum(map(is_right, faulty))
    named = sum(any(name == row["seeded"] for name, _ in row["found"]) for row in faulty)
    missed = sum(not row["found"] for row in faulty)
    quiet = sum(not row["found"] for row in healthy)
    return (
        f"{len(rows)} of {len(RUNS)} planned runs were made. Of {len(faulty)} runs with a seeded fault, {right} had it "
        f"named first and {named} at any place; in {missed} nothing was found. Of {len(healthy)} healthy runs, {quiet} "
        "were left alone."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a table of all runs."""
    lines = ["| run | fault | settings | accuracy | named |", "|---|---|---|---|---|"]
    for row in rows:
        named = [f"{name} ({sure:.2f})" for name, sure in row["found"][:KEPT]]
        more = len(row["found"]) - KEPT
        fault = ", ".join(f"{key} {value}" for key, value in row["fault"].items()) or "–"
        settings = ", ".join(one.partition(".")[2] or one for one in row["settings"]) or "–"
        accuracy = " → ".join(f"{one:.2f}" for one in row["accuracy"]) or "–"
        told = ", ".join(named) + (f" and {more} more" if more > 0 else "") or "nothing"
        lines.append(f"| {row['run']} | {fault} | {settings} | {accuracy} | {told} |")
    return "\n".join(lines)


def page() -> None:
    """Fills the page and its appendix."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    parts = {"TRL": ("trl", "stock trl"), "verl": ("verl", "stock verl")}
    fill(PAGE, "matrix", "\n\n".join([verdict(rows), shares(rows), "TRL and verl together:", matrix(rows)]))
    text = []
    for name, of in parts.items():
        text += [f"{name} alone:", matrix([row for row in rows if row["engine"] in of])]
    fill(TABLES, "engines", "\n\n".join(text))
    fill(TABLES, "runs", table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["judge", "page"])
    parser.add_argument("runs", nargs="?", type=Path)
    options = parser.parse_args()
    if options.what == "judge":
        rows = judge(options.runs)
        DATA.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        page()


if __name__ == "__main__":
    main()
