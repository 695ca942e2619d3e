"""Causes that `trustrl explain` names for the runs of `faults.py`: recall, false alarms and calibration.

    python studies/06-fault-found/found_faults.py judge RUNS    # writes docs/data/faults.jsonl
    python studies/06-fault-found/found_faults.py draw          # the figure, from it
    python studies/06-fault-found/found_faults.py page          # the tables of docs/results/fault-found.md, from it

Each run is judged twice: with the tokens that `record(trainer)` stored, and without them. Every run that was made
counts, also one that broke off.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from explained import HEALTHY, NO_METRICS, NOTHING, PAGE, ROOT, fill, wilson
from faults import FAULTS, KINDS, seed_of, table

DATA, FIGURE = ROOT / "docs/data/faults.jsonl", ROOT / "docs/figures/fault-confidence.svg"
FILES, RECORDS = "files", "records"
"""What a run was judged by: the trainer's files alone, or the recorded tokens too."""

PLACES = (1, 3)
BINS = ((0.0, 0.5), (0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.01))
"""Bins of the confidence. Causes told apart without records have at most 0.5."""

Row = dict[str, Any]


def judge(runs: Path) -> list[Row]:
    """Returns one row for each run that was made, in the order of the list."""
    rows = []
    for name, run in FAULTS.items():
        done = runs / f"{name}.done"
        if not done.exists():
            continue
        made = json.loads(done.read_text())
        if made.get("pilot"):
            raise SystemExit(f"{name} is a pilot, which is not judged.")
        rows.append(
            {
                "run": name, "seeded": run.cause or HEALTHY, "right": list(run.causes), "strength": run.strength,
                "engine": run.engine, "fault": run.fault, "settings": list(run.settings), "seed": seed_of(name),
                "code": made["code"], "seconds": made["seconds"],
            } | judged(runs / name)
        )  # fmt: skip
    return rows


def judged(folder: Path) -> Row:
    """Returns the causes of one run with their confidence, by what was read."""
    from trustrl.errors import TrustRLError
    from trustrl.runs.open_run import open_run
    from trustrl.tools.explain.explanation import explain

    try:
        run = open_run(folder)
        explained = {FILES: explain(replace(run, records=())), RECORDS: explain(run)}
    except TrustRLError as error:
        nothing = {by: [[NO_METRICS, 0.0]] for by in (FILES, RECORDS)}
        return {"error": str(error).replace(str(folder), "RUN"), **nothing}
    return {by: [[one.name, round(one.confidence, 3)] for one in each.causes] for by, each in explained.items()}


def is_found(row: Row, by: str, places: int) -> bool:
    """Returns whether one of the first causes is right."""
    return any(name in row["right"] for name, _ in row[by][:places])


def share(hits: Sequence[bool]) -> str:
    """Returns a count with its 95% Wilson interval."""
    if not hits:
        return "–"
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)} of {len(hits)} ({low:.2f} to {high:.2f})"


def recall(rows: Sequence[Row]) -> str:
    """Returns a table of recall and false alarms, by engine."""
    columns = [(by, places) for by in (RECORDS, FILES) for places in PLACES]
    named = {RECORDS: "with recorded tokens", FILES: "the trainer's files alone"}
    heads = [f"{named[by]}: {'first' if places == 1 else f'among the first {places}'}" for by, places in columns]
    lines = [
        f"| | {' | '.join(heads)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for engine in ("stock trl", "stock verl"):
        faulty = [row for row in rows if row["engine"] == engine and row["seeded"] != HEALTHY]
        planned = sum(run.engine == engine and run.cause is not None for run in FAULTS.values())
        cells = [share([is_found(row, by, places) for row in faulty]) for by, places in columns]
        lines.append(f"| faults, {engine}: {len(faulty)} of {planned} runs made | {' | '.join(cells)} |")
    healthy = [row for row in rows if row["seeded"] == HEALTHY]
    planned = sum(run.cause is None for run in FAULTS.values())
    alarms = [share([bool(row[by]) for row in healthy]) for by, _ in columns]
    lines.append(f"| healthy, false alarms: {len(healthy)} of {planned} runs made | {' | '.join(alarms)} |")
    return "\n".join(lines)


def by_kind(rows: Sequence[Row]) -> str:
    """Returns a table of what was named first, by kind and strength; TRL and verl together, with recorded tokens."""
    lines = ["| kind | weak | middle | strong | first | among the first 3 | named instead |", "|---" * 7 + "|"]
    for kind in KINDS:
        mine = [row for row in rows if row["seeded"] == kind.name]
        cells = []
        for strength in (1, 2, 3):
            hits = [is_found(row, RECORDS, 1) for row in mine if row["strength"] == strength]
            cells.append(f"{sum(hits)} of {len(hits)}" if hits else "–")
        firsts = [row[RECORDS][0][0] if row[RECORDS] else NOTHING for row in mine if not is_found(row, RECORDS, 1)]
        instead = ", ".join(f"{name} ({count})" for name, count in Counter(firsts).most_common()) or "–"
        cells += [share([is_found(row, RECORDS, places) for row in mine]) for places in PLACES]
        lines.append(f"| {kind.name} | {' | '.join([*cells, instead])} |")
    return "\n".join(lines)


def calibration(rows: Sequence[Row]) -> list[tuple[float, int, int]]:
    """Returns mean confidence, right and all first-named causes of each bin that has some, healthy runs included."""
    bins: dict[tuple[float, float], list[tuple[float, bool]]] = defaultdict(list)
    for row in rows:
        for name, confidence in row[RECORDS][:1]:
            if name == NO_METRICS:
                continue
            within = next(edges for edges in BINS if edges[0] <= confidence < edges[1])
            bins[within].append((confidence, name in row["right"]))
    kept = [bins[edges] for edges in BINS if edges in bins]
    return [(sum(c for c, _ in each) / len(each), sum(hit for _, hit in each), len(each)) for each in kept]


def draw(rows: Sequence[Row]) -> None:
    """Draws how often the first-named cause was right at its confidence."""
    import matplotlib.pyplot as plt

    points = calibration(rows)
    plt.rcParams["svg.hashsalt"] = "trustrl"
    figure, axes = plt.subplots(figsize=(4.5, 3.5), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for confidence, right, count in points:
        low, high = wilson(right, count)
        axes.plot([confidence] * 2, [low, high], color="C0", linewidth=1.5)
        axes.plot(confidence, right / count, "o", color="C0")
        axes.annotate(
            f"{right} of {count}", (confidence, right / count), (5, -12), textcoords="offset points", fontsize=8
        )
    axes.set(
        xlabel="confidence of the cause named first", ylabel="share that was right", xlim=(0.2, 1.12), ylim=(0, 1.05)
    )
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


def misses(rows: Sequence[Row]) -> str:
    """Returns a table of the runs whose fault was not named first, and of healthy runs with a cause."""
    lines = ["| run | strength | settings | named, with recorded tokens |", "|---" * 4 + "|"]
    for row in rows:
        healthy = row["seeded"] == HEALTHY
        if (not row[RECORDS]) if healthy else is_found(row, RECORDS, 1):
            continue
        fault = [f"{key} {value}" for key, value in row["fault"].items()]
        settings = ", ".join([*fault, *(one.partition(".")[2] or one for one in row["settings"])])
        named = ", ".join(f"{name} ({sure:.2f})" for name, sure in row[RECORDS]) or NOTHING
        lines.append(f"| {row['run']}, {row['seeded']} | {row['strength'] or '–'} | {settings} | {named} |")
    if not rows:
        return "No run has been made yet."
    return "\n".join(lines) if len(lines) > 2 else "No run was missed."


def page(rows: Sequence[Row]) -> None:
    """Fills the page."""
    fill(PAGE, "kinds", table())
    fill(PAGE, "recall", recall(rows) + "\n\n" + by_kind(rows))
    figure = f"![How often the cause named first was right, by its confidence](../figures/{FIGURE.name})"
    fill(PAGE, "confidence", figure if rows else "")
    fill(PAGE, "misses", misses(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["judge", "draw", "page"])
    parser.add_argument("runs", nargs="?", type=Path)
    options = parser.parse_args()
    if options.what == "judge":
        rows = judge(options.runs)
        DATA.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    rows = [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []
    {"draw": draw, "page": page}[options.what](rows)


if __name__ == "__main__":
    main()
