"""`trustrl run --resume` with the real TRL on damaged, incomplete and foreign checkpoints."""

import json
import os
import shutil

import pytest

pytest.importorskip("trl")

from support.trl_commands import run
from trustrl.runner.directory import RunDirectory

pytestmark = pytest.mark.xdist_group("damaged")
SETTINGS = ["schedule.steps=12", "schedule.checkpoint_every=4", "evaluation.count=16", "optimiser.learning_rate=3e-3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run("run", *SETTINGS, "--out", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert names_in(folder) == ["checkpoint-12", "checkpoint-8"]
    return folder


@pytest.fixture
def killed(finished, tmp_path):
    """A copy of it as a kill leaves it: with checkpoints and no result."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    return folder


def resumed(folder, *more):
    return run("run", *SETTINGS, "--out", folder, "--resume", *more)


def names_in(folder):
    return sorted(one.name for one in (folder / "checkpoints").iterdir() if one.is_dir())


def measured(folder):
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in RunDirectory(folder).rows()]
    return rows, RunDirectory(folder).rows("evaluation")


def test_a_cut_off_newest_checkpoint_is_set_aside_and_the_run_resumes_bit_for_bit_from_the_one_before(killed, finished):
    """And directories of the user's own are neither renamed on resume nor deleted by later saves."""
    checkpoints = killed / "checkpoints"
    for name in ("checkpoint-best", "checkpoint-4-best"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "mine.txt").write_text("mine")
        os.utime(checkpoints / name, (0, 0))
    os.truncate(checkpoints / "checkpoint-12" / "model.safetensors", 1000)
    done = resumed(killed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checkpoint-12 is not used: model.safetensors has 1,000 bytes" in done.stderr
    assert "It is now set-aside-checkpoint-12." in done.stderr
    assert "resuming after step 8" in done.stderr
    assert measured(killed) == measured(finished)
    assert names_in(killed) == [
        "checkpoint-12", "checkpoint-4-best", "checkpoint-8", "checkpoint-best", "set-aside-checkpoint-12",
    ]  # fmt: skip
    assert (checkpoints / "checkpoint-best" / "mine.txt").read_text() == "mine"
    assert (checkpoints / "set-aside-checkpoint-12" / "model.safetensors").stat().st_size == 1000


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_run_whose_only_checkpoint_lacks_a_file_that_transformers_would_skip_stops(killed, finished, name):
    shutil.rmtree(killed / "checkpoints" / "checkpoint-12")
    (killed / "checkpoints" / "checkpoint-8" / name).unlink()
    done = resumed(killed)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "No intact checkpoint is left to resume from." in done.stderr
    assert name.split("_")[0].split(".")[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert names_in(killed) == ["checkpoint-8"], "nothing is renamed"
    assert measured(killed)[0] == measured(finished)[0], "nothing is forgotten"


def test_a_checkpoint_that_others_can_write_is_refused_with_2_unless_it_is_trusted(killed, finished):
    shutil.rmtree(killed / "checkpoints" / "checkpoint-12")
    (killed / "checkpoints" / "checkpoint-8" / "optimizer.pt").chmod(0o664)
    done = resumed(killed)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "optimizer.pt is writable by its group" in done.stderr
    assert measured(killed)[0] == measured(finished)[0], "nothing is forgotten"
    done = resumed(killed, "--trust-checkpoint")
    assert done.returncode == 0, done.stderr[-3000:]
    assert measured(killed) == measured(finished)


def test_a_checkpoint_lists_its_files_and_others_cannot_write_them(finished):
    for name in ("checkpoint-8", "checkpoint-12"):
        checkpoint = finished / "checkpoints" / name
        listed = json.loads((checkpoint / "trustrl_complete").read_text())["files"]
        assert set(listed) == {one.name for one in checkpoint.iterdir()} - {"trustrl_complete"}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= listed.keys()
        assert all(one.stat().st_mode & 0o022 == 0 for one in (checkpoint, *checkpoint.iterdir()))
