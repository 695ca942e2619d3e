"""Rehearsals of the papers' experiments with one command, and what every one of them must show."""

import json
import subprocess
import sys

from support.rendezvous import own_environment
from trustrl.runner.recipe import load


def rehearse(folder, recipe, **more):
    """Returns the recipe that a rehearsal in `folder`/run trained, and what the command said on stderr."""
    command = [sys.executable, "-m", "trustrl.cli", "run", str(recipe), "--rehearse", "--out", "run"]
    environment = own_environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **more)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    log = folder / "run/verl.log"
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text(errors="replace")[-3000:] if log.exists() else "")
    return load(folder / "run/recipe.toml"), done.stderr


def check(folder, recipe):
    """Every update has a gradient, the stand-in is right sometimes, and each benchmark has its own curves."""
    run = folder / "run"
    metrics, evaluations = (
        [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "evaluation")
    )
    assert metrics[-1]["step"] == recipe.schedule.steps
    assert 0 < sum(row["reward"] for row in metrics) < len(metrics)
    assert max(row["grad_norm"] for row in metrics) > 1e-3
    assert (evaluations[0]["step"], evaluations[-1]["step"]) == (0, recipe.schedule.steps)
    for block in recipe.evaluation.blocks():
        assert all(f"accuracy/{block.name}" in row and f"pass@2/{block.name}" in row for row in evaluations)
    assert list((run / "records").rglob("*.parquet"))
