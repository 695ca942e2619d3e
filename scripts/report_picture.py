"""Picture of a report with a cause, for the README: `python scripts/report_picture.py`.

The run is the first study's training without a region on a vLLM in bf16, sixteen updates on each rollout, seed 1. Its
metrics are in docs/results/data. Needs pyarrow, playwright and Chromium (`nox -s report` has them).
"""

import json
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from trustrl.runner.recipe import load
from trustrl.runs.open_run import open_runs
from trustrl.tools.explain.explanation import explain
from trustrl.tools.report.html_page import page
from trustrl.tools.report.report_contents import gather

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/results/data"
PICTURE = ROOT / "docs/figures/report-cause.png"
RUN = {"setting": "both", "arm": "pg-is", "seed": 1}
SIZE = (1366, 768)


def is_the_run(row: dict[str, object]) -> bool:
    """Returns True if the row belongs to the run of the picture."""
    return all(row[key] == value for key, value in RUN.items())


def run_folder(path: Path) -> Path:
    """Writes the run's folder from the study's committed metrics and returns it."""
    path.mkdir(parents=True)
    (result,) = filter(is_the_run, map(json.loads, (DATA / "runs.jsonl").read_text().splitlines()))
    rows = [
        {key: value for key, value in row.items() if value is not None and key not in RUN}
        for row in pq.read_table(DATA / "steps.parquet").to_pylist()
        if is_the_run(row)
    ]
    recipe = load(ROOT / "recipes/evidence/both.toml", [f"name={path.name}", "region.preset=pg-is", "schedule.seed=1"])
    accuracies = ((0, result["accuracy_before"]), (result["steps"], result["accuracy_after"]))
    evaluations = [{"step": step, "accuracy": share, "count": recipe.evaluation.count} for step, share in accuracies]
    (path / "recipe.toml").write_text(recipe.to_toml())
    (path / "result.json").write_text(json.dumps({"name": path.name, "seconds": result["seconds"]}))
    for name, lines in (("metrics", rows), ("evaluation", evaluations)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def main() -> None:
    """Takes the picture of the report's first screen and prints the cause."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import browsing

    with tempfile.TemporaryDirectory() as temporary:
        folder = run_folder(Path(temporary) / "no-region")
        file = Path(temporary) / "report.html"
        file.write_text(page(gather(open_runs([folder]))), encoding="utf-8")
        with browsing.started() as browser:
            tab = browsing.blank_tab(browser, SIZE)
            tab.goto(file.as_uri())
            card = tab.locator(".cause").first.bounding_box()
            tab.screenshot(
                path=PICTURE, clip={"x": 0, "y": 0, "width": SIZE[0], "height": card["y"] + card["height"] + 4}
            )
        (cause, *_) = explain(folder).causes
    print(f"{PICTURE.stat().st_size / 1000:.0f} kB; {cause.name}, confidence {cause.confidence:.2f}: {cause.reason}")


if __name__ == "__main__":
    main()
