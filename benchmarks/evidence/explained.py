"""Diagnoses of `trustrl explain` for the runs of `faults.py`, compared with the seeded faults.

    python benchmarks/evidence/explained.py judge RUNS    # writes docs/data/explained.jsonl
    python benchmarks/evidence/explained.py page          # fills docs/guides/explain.md from it

A run counts for the first cause that `explain` names. Every run counts, so a run without a result stops the script.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pages import fill

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/data/explained.jsonl", ROOT / "docs/guides/explain.md"
HEALTHY = "healthy"
NOTHING = "nothing"
KEPT = 2
"""Number of findings that a run's row names. Further findings are only counted."""


def judge(runs: Path) -> list[dict[str, Any]]:
    """Returns one row for each run, in the order of `faults.py`."""
    from faults import RUNS, seed_of

    from trustrl.runner.directory import RunDirectory
    from trustrl.runner.recipe import load
    from trustrl.tools.explain.explanation import explain

    rows = []
    for name, run in RUNS.items():
        directory = RunDirectory(runs / name)
        result, recipe = directory.result(), load(directory.path / "recipe.toml")
        found = [one.to_dict() for one in explain(directory.path)]
        rows.append(
            {
                "run": name,
                "since": run.since,
                "seeded": run.cause or HEALTHY,
                "severity": run.severity,
                "model": recipe.model.name,
                "sampler": f"{recipe.sampler.kind}, {recipe.sampler.dtype}",
                "region": recipe.region.kind,
                "updates": recipe.schedule.updates_per_batch,
                "records": recipe.records is not None,
                "seed": seed_of(name),
                "accuracy": [result["accuracy_before"], result["accuracy_after"]],
                "found": [[one["name"], one["confidence"]] for one in found],
            }
        )
    return rows


def first(row: dict[str, Any]) -> str:
    """Returns the first named cause."""
    return row["found"][0][0] if row["found"] else NOTHING


def matrix(rows: list[dict[str, Any]]) -> str:
    """Returns a table of seeded causes against first named causes."""
    seeded = list(dict.fromkeys(row["seeded"] for row in rows))
    counts = Counter((row["seeded"], first(row)) for row in rows)
    causes = [one for one in seeded if one != HEALTHY]
    others = sorted({first(row) for row in rows} - {*causes, NOTHING})
    columns = [*causes, *others, NOTHING]
    lines = [f"| seeded ↓, named first → | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for cause in seeded:
        right = NOTHING if cause == HEALTHY else cause
        cells = [(f"**{counts[cause, one]}**" if one == right else f"{counts[cause, one] or ''}") for one in columns]
        lines.append(f"| {cause} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns three sentences with the counts."""
    faulty = [row for row in rows if row["seeded"] != HEALTHY]
    healthy = [row for row in rows if row["seeded"] == HEALTHY]
    right = sum(first(row) == row["seeded"] for row in faulty)
    named = sum(any(name == row["seeded"] for name, _ in row["found"]) for row in faulty)
    missed = sum(not row["found"] for row in faulty)
    quiet = sum(not row["found"] for row in healthy)
    return (
        f"Of {len(faulty)} runs with a seeded fault, {right} had it named first and {named} at any place; in {missed} "
        f"nothing was found. Of {len(healthy)} healthy runs, {quiet} were left alone."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a table of all runs."""
    lines = [
        "| run | severity | model | sampler | region, updates | records | accuracy | named |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        named = [f"{name} ({sure:.2f})" for name, sure in row["found"][:KEPT]]
        more = len(row["found"]) - KEPT
        before, after = row["accuracy"]
        lines.append(
            f"| {row['run']} | {row['severity'] or '–'} | {row['model']} | {row['sampler']} "
            f"| {row['region']}, {row['updates']} | {'yes' if row['records'] else 'no'} | {before:.2f} → {after:.2f} "
            f"| {', '.join(named) or NOTHING}{f' and {more} more' if more > 0 else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["judge", "page"])
    parser.add_argument("runs", type=Path, nargs="?")
    options = parser.parse_args()
    if options.what == "judge":
        DATA.write_text("".join(json.dumps(row) + "\n" for row in judge(options.runs)))
        return
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    first_runs, later = ([row for row in rows if row["since"] == since] for since in (False, True))
    fill(PAGE, "matrix", f"{verdict(first_runs)}\n\n{matrix(first_runs)}")
    fill(PAGE, "runs", table(first_runs))
    fill(PAGE, "since", table(later))


if __name__ == "__main__":
    main()
