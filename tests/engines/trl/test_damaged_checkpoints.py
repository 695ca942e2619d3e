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


def as_0_1_0_left_it(folder):
    for mark in (folder / "checkpoints").glob("*/trustrl_complete"):
        mark.write_bytes(b"")
    (folder / "run_id").unlink()


def without_the_key(folder):
    """The same as a checkpoint from another installation."""
    return {"TRUSTRL_KEY_FILE": str(folder.parent / "another key")}


def in_another_run(folder):
    (folder / "run_id").write_text("b" * 32)


def with_one_more_file(folder):
    shutil.copy(folder / "checkpoints/checkpoint-12/optimizer.pt", folder / "checkpoints/checkpoint-12/scaler.pt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (as_0_1_0_left_it, "no manifest, as trustrl 0.1.0 left it"),
        (without_the_key, "If you wrote it on another machine, set TRUSTRL_KEY_FILE to a copy of that machine's key"),
        (in_another_run, "a checkpoint that you wrote in another run"),
        (with_one_more_file, "scaler.pt, which its manifest does not list"),
    ],
    ids=["0.1.0", "another key", "another run", "unlisted file"],
)
def test_a_checkpoint_by_another_author_is_refused_with_2_and_left_where_it_is(killed, finished, change, said):
    environment = change(killed) or {}
    done = run("run", *SETTINGS, "--out", killed, "--resume", **environment)
    assert done.returncode == 2, done.stderr[-3000:]
    assert said in done.stderr
    assert "--trust-checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert names_in(killed) == names_in(finished), "nothing is renamed"
    assert measured(killed)[0] == measured(finished)[0], "nothing is forgotten"


def test_a_checkpoint_of_release_0_1_0_is_resumed_on_request(killed, finished):
    shutil.rmtree(killed / "checkpoints" / "checkpoint-12")
    as_0_1_0_left_it(killed)
    done = resumed(killed, "--trust-checkpoint")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming after step 8" in done.stderr
    assert measured(killed) == measured(finished)
    sizes = {name: (killed / "checkpoints" / name / "trustrl_complete").stat().st_size for name in names_in(killed)}
    assert sizes["checkpoint-8"] == 0, "not signed afterwards"
    assert sizes["checkpoint-12"] > 0


def test_a_checkpoint_lists_its_files_and_others_cannot_write_them(finished):
    for name in ("checkpoint-8", "checkpoint-12"):
        checkpoint = finished / "checkpoints" / name
        listed = json.loads((checkpoint / "trustrl_complete").read_text())["files"]
        assert set(listed) == {one.name for one in checkpoint.iterdir()} - {"trustrl_complete"}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= listed.keys()
        assert all(one.stat().st_mode & 0o022 == 0 for one in (checkpoint, *checkpoint.iterdir()))


def test_two_ranks_resume_from_the_checkpoint_that_the_first_of_them_verified(tmp_path):
    """And stop together if it refuses."""
    folder, settings = tmp_path / "run", [*SETTINGS, "engine.ranks_per_node=2"]
    done = run("run", *settings, "--out", folder, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = measured(folder)
    (folder / "result.json").unlink()
    os.truncate(folder / "checkpoints" / "checkpoint-12" / "rng_state_1.pth", 1000)
    refused = run("run", *settings, "--out", folder, "--resume", ranks=2, TRUSTRL_KEY_FILE=str(tmp_path / "new key"))
    assert refused.returncode != 0
    assert refused.stderr.count("set TRUSTRL_KEY_FILE to a copy of that machine's key") == 2, refused.stderr[-3000:]
    assert names_in(folder) == ["checkpoint-12", "checkpoint-8"]
    done = run("run", *settings, "--out", folder, "--resume", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("checkpoint-12 is not used: rng_state_1.pth has 1,000 bytes") == 1
    assert done.stderr.count("resuming after step 8") == 1
    assert measured(folder) == whole
