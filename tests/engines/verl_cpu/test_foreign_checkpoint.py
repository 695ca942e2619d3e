"""A pickle planted in a foreign run directory, which the real verl would execute."""

import os
import pathlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.tiny_models import save_model
from trustrl.runner.recipe import load

RECIPE = Path(__file__).parents[3] / "recipes/verl-tour.toml"
SMALL = [
    "schedule.steps=2", "schedule.checkpoint_every=1", "schedule.prompts_per_step=8", "schedule.completions_per_prompt=4",
    "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16", "schedule.max_completion_tokens=8",
    "evaluation.count=8", "task.problems=64",
]  # fmt: skip


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def test_a_pickle_in_a_run_directory_that_others_can_write_is_not_executed(tmp_path):
    run, executed = tmp_path / "run", tmp_path / "executed"
    save_model(tmp_path / "model", tied=True)
    settings = [*SMALL, f"model.name={tmp_path / 'model'}"]
    checkpoint = run / "checkpoints" / "global_step_1"
    (checkpoint / "actor").mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        file = checkpoint / "actor" / f"{part}_world_size_1_rank_0.pt"
        file.write_bytes(pickle.dumps(Planted(executed)))
    (checkpoint / "data.pt").write_bytes(pickle.dumps(Planted(executed)))
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (run / "recipe.toml").write_text(load(RECIPE, settings).to_toml())
    run.chmod(0o777)
    command = [sys.executable, "-m", "trustrl.cli", "run", str(RECIPE), *settings, "--out", str(run), "--resume"]
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False, timeout=900
    )
    assert not executed.exists()
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"{run} is writable by everybody" in done.stderr
    assert "--trust-checkpoint" in done.stderr
