"""A run's files after power failures: states that a file system without order may leave, replayed from real writes."""

import json
import os
import zipfile
from itertools import product

import pytest
from failures import power_rows
from failures.crash_states import Disk, crashes, lies_outside_checkpoints, recorded

from support.checkpoint_folders import safetensors
from support.recipes import small
from support.record_names import part_name
from trustrl.recording.record_files import SEQUENCES, TEXTS
from trustrl.recording.storage import make_folder, write_text
from trustrl.runner import manifests
from trustrl.runner.checkpoints import only_the_owner_writes, rotate
from trustrl.runner.commit_points import Committer
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import Seal
from trustrl.runner.run_recipe import run
from trustrl.runner.signing import load_key

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the names of open files are read there")
RECIPE = small("schedule.checkpoint_every=2", "evaluation.count=16")


def fake_engine(recipe, directory, progress):
    """Writes what TRL and its adapter would write on two ranks, by the same functions."""
    seal, committer = Seal(load_key(progress.log), directory.run_id), Committer(directory)
    directory.append("evaluation", {"step": 0, "accuracy": 0.25})
    for step in range(1, recipe.schedule.steps + 1):
        for inside, rank in product(("", SEQUENCES, TEXTS), (0, 1)):
            make_folder(directory.path / "records" / inside)
            write_text(directory.path / "records" / inside / part_name(step - 1, rank), f"{inside} {step} {rank}" * 40)
        directory.append("metrics", {"step": step, "reward": step / 10, "loss": 0.5})
        if step % recipe.schedule.checkpoint_every == 0:
            saved = directory.checkpoints / f"checkpoint-{step}"
            saved.mkdir(parents=True)
            for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
                with zipfile.ZipFile(saved / name, "w") as file:
                    file.writestr("data", bytes(500))
            (saved / "model.safetensors").write_bytes(safetensors(100))
            (saved / "trainer_state.json").write_text(json.dumps({"global_step": step}))
            manifests.write_manifest(saved, seal, committer.commit(step, recorded=step - 1))
            rotate(directory.checkpoints, "checkpoint-", 2)
    directory.append("evaluation", {"step": step, "accuracy": 0.75})
    committer.commit(step, recorded=step - 1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The trace of a whole run."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    folder.mkdir()
    files = power_rows.files_of(folder)
    marks = {"saved": (manifests, "write_manifest", files), "finished": (RunDirectory, "finish", files)}
    with only_the_owner_writes(), recorded(folder, marks) as trace:
        run(RECIPE, folder, engine=fake_engine)
    assert [label for _, label, _ in trace.marks] == [
        *(f"saved checkpoint-{step}" for step in (2, 4, 6, 8)),
        "finished",
    ]
    return trace


@pytest.fixture
def outcomes(traced, tmp_path, monkeypatch):
    """Outcomes of crashes, by kind."""
    monkeypatch.setattr("trustrl.runner.directory.environment", dict)

    def count(number, **more):
        counts = {}
        for crash in crashes(traced, number, **more):
            with only_the_owner_writes():
                crash.write(tmp_path / "state")
                got = power_rows.outcome(tmp_path / "state", RECIPE, traced, crash.point)
            counts.setdefault(got.kind, []).append((crash.point, crash.way, got.step, got.said))
        return counts

    return count


def test_the_last_state_of_a_trace_is_the_run_itself(traced, tmp_path):
    """Otherwise the trace lacks writes."""
    disk = Disk(traced, lambda path: True)
    for change in traced.changes:
        disk.apply(change)
    disk.write(tmp_path / "state", lambda change: change)
    assert contents(tmp_path / "state") == contents(traced.root)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("number", "first"), [(96, 1), (48, -8)], ids=["everywhere", "at the end"])
def test_no_power_failure_on_an_honest_disk_is_refused_or_loses_more_than_the_unsaved_steps(
    traced, outcomes, number, first
):
    counts = outcomes(number, first=first % len(traced.changes))
    assert counts.keys() <= {"exact", "finished"}, {kind: rows[:3] for kind, rows in counts.items()}
    assert {row[2] for row in counts["exact"]} == ({0, 2, 4, 6, 8} if first == 1 else {8})


def test_a_disk_that_loses_synced_files_of_the_run_leads_to_no_silent_loss(outcomes):
    counts = outcomes(96, lies=lies_outside_checkpoints)
    assert "silent" not in counts, counts["silent"][:3]
    assert len(counts["refused"]) > 20
    assert len(counts["exact"]) > 20
    assert any("lost are the rows of step" in row[3] for row in counts["refused"])
