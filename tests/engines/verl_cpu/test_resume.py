"""`trustrl run --resume` with the real verl: its own checkpoints, and pickles planted in a foreign run directory."""

import json
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
from trustrl.runner.checkpoints import only_the_owner_writes
from trustrl.runner.manifests import Seal, write_manifest
from trustrl.runner.recipe import load
from trustrl.runner.signing import Key, load_key

RECIPE = Path(__file__).parents[3] / "recipes/verl-tour.toml"
SMALL = [
    "schedule.steps=2", "schedule.checkpoint_every=1", "schedule.prompts_per_step=8", "schedule.completions_per_prompt=4",
    "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16", "schedule.max_completion_tokens=8",
    "evaluation.count=8", "task.problems=64",
]  # fmt: skip


def resumed(settings, run):
    """Starts the run or resumes it."""
    command = [sys.executable, "-m", "trustrl.cli", "run", str(RECIPE), *settings, "--out", str(run), "--resume"]
    return subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.long
def test_verl_s_checkpoints_are_signed_and_a_damaged_one_is_replaced_by_the_one_before(tmp_path):
    save_model(tmp_path / "model", tied=True)
    settings, run = [*SMALL, f"model.name={tmp_path / 'model'}"], tmp_path / "run"
    done = resumed(settings, run)
    assert done.returncode == 0, done.stderr[-3000:]
    for batch in (1, 2):
        checkpoint = run / "checkpoints" / f"global_step_{batch}"
        listed = json.loads((checkpoint / "trustrl_complete").read_text())["files"]
        found = {one.relative_to(checkpoint).as_posix() for one in checkpoint.rglob("*") if one.is_file()}
        assert set(listed) == found - {"trustrl_complete"}, "verl writes nothing after the manifest"
    (run / "result.json").unlink()
    os.truncate(run / "checkpoints/global_step_2/actor/optim_world_size_1_rank_0.pt", 1000)
    done = resumed(settings, run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "global_step_2 is not used: actor/optim_world_size_1_rank_0.pt has 1,000 bytes" in done.stderr
    assert "resuming after step 1" in done.stderr
    assert (run / "checkpoints/set-aside-global_step_2").is_dir()
    assert (run / "checkpoints/global_step_2/trustrl_complete").is_file()


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


@pytest.fixture
def planted(tmp_path):
    """(settings, run directory of another user's making, file that its checkpoint would write when loaded)."""
    run, executed = tmp_path / "run", tmp_path / "executed"
    save_model(tmp_path / "model", tied=True)
    settings = [*SMALL, f"model.name={tmp_path / 'model'}"]
    checkpoint = run / "checkpoints" / "global_step_1"
    with only_the_owner_writes():
        (checkpoint / "actor").mkdir(parents=True)
        for part in ("model", "optim", "extra_state"):
            file = checkpoint / "actor" / f"{part}_world_size_1_rank_0.pt"
            file.write_bytes(pickle.dumps(Planted(executed)))
        (checkpoint / "data.pt").write_bytes(pickle.dumps(Planted(executed)))
        (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
        (run / "recipe.toml").write_text(load(RECIPE, settings).to_toml())
    return settings, run, executed


def writable_by_everybody(run):
    run.chmod(0o777)


def unpacked(run):
    """Every file belongs to the user, as after `tar x`, and there is no manifest."""


def signed_elsewhere(run):
    """A complete, consistent manifest from another installation."""
    (run / "run_id").write_text("a" * 32)
    write_manifest(run / "checkpoints" / "global_step_1", Seal(Key(bytes(32)), "a" * 32))


def signed_elsewhere_with_our_key_s_name(run):
    signed_elsewhere(run)
    file = run / "checkpoints" / "global_step_1" / "trustrl_complete"
    name = load_key(lambda _: None).name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"key": name}))


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (writable_by_everybody, 2, "run is writable by everybody"),
        (unpacked, 2, "no manifest, as trustrl 0.1.0 left it"),
        (signed_elsewhere, 2, "verl and DeepSpeed unpickle it"),
        (signed_elsewhere_with_our_key_s_name, 1, "has changed since it was signed"),
    ],
)
def test_a_pickle_in_a_foreign_run_directory_is_not_executed(planted, how, code, said):
    settings, run, executed = planted
    how(run)
    done = resumed(settings, run)
    assert not executed.exists()
    assert done.returncode == code, done.stderr[-3000:]
    assert said in done.stderr
    assert code == 1 or "--trust-checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run / "verl.log").exists(), "verl was not started"
    pickle.loads((run / "checkpoints" / "global_step_1" / "data.pt").read_bytes())
    assert executed.exists(), "loading it would have executed it"
