"""Collection of the comparison's finished runs in two small files in docs/results/data: runs.jsonl, steps.parquet.

    trustrl compare recipes/evidence/stale.toml --arms recipes/evidence/arms.toml --seeds 5 --out RUNS/stale
    python studies/01-which-region-wins/collect.py RUNS

Each folder in RUNS is named after its setting. Runs that were collected earlier and are not in RUNS are kept.
"""

import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trustrl.runner.directory import RunDirectory

DATA = Path(__file__).parents[2] / "docs/results/data"
RUNS, STEPS = DATA / "runs.jsonl", DATA / "steps.parquet"
METRICS = (
    "reward", "entropy", "grad_norm", "trustrl/masked_share", "trustrl/projected_share", "trustrl/divergence_mean",
    "trustrl/gap_abs_mean", "trustrl/ratio_max", "trustrl/kl_k3", "trustrl/mismatch_abs_mean",
)  # fmt: skip
KEY = ("setting", "arm", "seed")
DERIVED = ("collapsed", "rollouts", "reward_first", "reward_last", "reward_best")
"""Parts of a result that follow from the steps. `findings.py` computes those that the pages need."""


def schema() -> pa.Schema:
    keys = [("setting", pa.dictionary(pa.int8(), pa.string())), ("arm", pa.dictionary(pa.int8(), pa.string()))]
    counts = [("seed", pa.int16()), ("step", pa.int16())]
    return pa.schema([*keys, *counts, *((name, pa.float32()) for name in METRICS)])


def one(setting: str, arm: str, directory: RunDirectory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a run's result and a row for each of its steps."""
    result = {name: value for name, value in directory.result().items() if name not in DERIVED}
    key = {"setting": setting, "arm": arm, "seed": result["seed"]}
    versions = json.loads((directory.path / "environment.json").read_text())["packages"]
    rows = [{**key, "step": row["step"], **{name: row.get(name) for name in METRICS}} for row in directory.rows()]
    return {**key, **result, "packages": versions}, rows


def collect(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = [
        one(path.parents[2].name, path.parents[1].name, RunDirectory(path.parent))
        for path in sorted(folder.glob("*/*/seed-*/result.json"))
    ]
    runs, steps = [run for run, _ in found], [row for _, rows in found for row in rows]
    new = {tuple(run[name] for name in KEY) for run in runs}
    if RUNS.exists():
        before = [json.loads(line) for line in RUNS.read_text().splitlines()]
        runs += [run for run in before if tuple(run[name] for name in KEY) not in new]
        steps += [row for row in pq.read_table(STEPS).to_pylist() if tuple(row[name] for name in KEY) not in new]
    return sorted(runs, key=itemgetter(*KEY)), sorted(steps, key=itemgetter(*KEY, "step"))


def main() -> None:
    runs, steps = collect(Path(sys.argv[1]))
    DATA.mkdir(parents=True, exist_ok=True)
    RUNS.write_text("".join(json.dumps(run) + "\n" for run in runs))
    pq.write_table(pa.Table.from_pylist(steps, schema=schema()), STEPS, compression="zstd")
    print(f"{len(runs)} runs, {len(steps)} steps, {STEPS.stat().st_size / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
