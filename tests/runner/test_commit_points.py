"""Commit points: what they cover, what is lost, what is taken back, and what the environment says of each attempt."""

import json
import os

import pytest

from support.checkpoint_folders import OURS, checkpoint
from support.recipes import small
from support.record_names import part_name
from trustrl.runner import commit_points, directory
from trustrl.runner.checkpoints import Survey
from trustrl.runner.commit_points import Committer, loss_before, take_back
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import fault_of, run_files_of, write_manifest
from trustrl.runner.run_recipe import run

EVERY = 2


def steps_of(run, first, last, committer):
    """Makes steps with a record, and a checkpoint every second step."""
    (run.path / "records").mkdir(parents=True, exist_ok=True)
    for step in range(first, last + 1):
        run.append("metrics", {"step": step, "reward": step / 10})
        (run.path / "records" / part_name(step - 1, 0)).write_text(f"record of step {step}")
        if step % EVERY == 0:
            write_manifest(checkpoint(run.checkpoints, step, seal=None), OURS, committer.commit(step, step - 1))


@pytest.fixture
def made(tmp_path):
    """A run of eight steps with all its checkpoints."""
    made = RunDirectory(tmp_path / "run")
    made.checkpoints.mkdir(parents=True)
    made.append("evaluation", {"step": 0, "accuracy": 0.25})
    steps_of(made, 1, 8, Committer(made))
    return made


def at(made, step):
    return made.checkpoints / f"checkpoint-{step}"


def test_a_commit_lists_the_steps_and_files_since_the_last_one_and_hashes_no_other(made, monkeypatch):
    lines = [json.loads(line) for line in (made.path / "commits.jsonl").read_text().splitlines()]
    assert [line["metrics.jsonl"]["steps"] for line in lines] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [list(line["files"]) for line in lines] == [
        [part_name(step, 0) for step in (first, first + 1)] for first in (0, 2, 4, 6)
    ]
    read = []
    original = commit_points.synced_and_hashed
    monkeypatch.setattr(commit_points, "synced_and_hashed", lambda path: (read.append(path.name), original(path))[1])
    steps_of(made, 9, 10, Committer(made))
    assert read == [part_name(8, 0), part_name(9, 0)]
    last = json.loads((made.path / "commits.jsonl").read_text().splitlines()[-1])
    assert last["metrics.jsonl"]["steps"] == [9, 10]


def test_a_manifest_covers_the_files_byte_by_byte(made):
    for step in (2, 4, 6, 8):
        assert fault_of(at(made, step), OURS) is None
        assert run_files_of(at(made, step)).keys() == {"metrics.jsonl", "evaluation.jsonl", "commits.jsonl"}
        assert loss_before(made, at(made, step)) is None
    for name in ("metrics.jsonl", "evaluation.jsonl", "commits.jsonl"):
        file = made.path / name
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert name in loss_before(made, at(made, 8)), (name, place)
        file.write_bytes(whole)


def test_rows_of_later_steps_are_not_part_of_a_commit(made):
    """verl may have logged them before trustrl commits."""
    for step in (9, 10, 11):
        made.append("metrics", {"step": step})
    with (made.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12')
    entries = Committer(made).commit(10, 9)
    covered = (made.path / "metrics.jsonl").read_bytes()[: entries["metrics.jsonl"]["bytes"]]
    assert [json.loads(line)["step"] for line in covered.splitlines()] == list(range(1, 11))


@pytest.mark.parametrize("way", ["missing", "short", "zeroed"])
def test_a_loss_names_the_steps(made, way):
    file = made.path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    if way == "missing":
        file.unlink()
    elif way == "short":
        file.write_bytes(b"".join(lines[:5]))
    else:
        file.write_bytes(b"".join([*lines[:5], bytes(len(lines[5])), *lines[6:]]))
    said = {"missing": "steps 1 to 8", "short": "steps 6 to 8", "zeroed": "steps 6 to 7"}[way]
    assert f"lost are the rows of {said}" in loss_before(made, at(made, 8))
    assert (loss_before(made, at(made, 4)) is None) == (way != "missing")


def test_a_changed_row_is_located_between_two_commits(made):
    file = made.path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"reward": 0.6', '"reward": 0.7'))
    assert loss_before(made, at(made, 8)) == "metrics.jsonl has changed, in the rows of steps 5 to 8"
    assert loss_before(made, at(made, 4)) is None


def test_many_lost_record_files_are_counted(made):
    for step in range(8):
        (made.path / "records" / part_name(step, 0)).unlink()
    steps_of(made, 9, 12, Committer(made))
    for step in range(8, 11):
        (made.path / "records" / part_name(step, 0)).write_bytes(b"")
    said = loss_before(made, at(made, 12))
    assert said.count(" is missing") == 8
    assert said.endswith("and 3 more record files")


def test_the_commits_themselves_may_be_lost(made):
    (made.path / "commits.jsonl").unlink()
    assert "commits.jsonl is missing, so the files of the record cannot be checked" in loss_before(made, at(made, 8))


def test_what_lies_behind_a_commit_is_kept_next_to_it_and_never_overwritten(made):
    said = []
    rows = (made.path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        take_back(made, at(made, 4), 4, None, said.append)
        assert [row["step"] for row in made.rows()] == [1, 2, 3, 4]
        assert loss_before(made, at(made, 4)) is None
        with (made.path / "metrics.jsonl").open("ab") as file:
            file.write(b"\xff half a li")
    dropped = (made.path / "metrics.jsonl.dropped").read_bytes()
    assert dropped == rows[-len(dropped) + len(b"\xff half a li\n") :] + b"\xff half a li\n"
    assert said[0] == "took back 4 rows of metrics.jsonl after step 4; metrics.jsonl.dropped keeps them"


def test_a_resumed_run_commits_on_from_where_it_was(made):
    take_back(made, at(made, 4), 4, None, print)
    for step in (6, 8):
        at(made, step).rename(made.checkpoints / f"set-aside-checkpoint-{step}")
    steps_of(made, 5, 8, Committer(made))
    assert loss_before(made, at(made, 8)) is None
    lines = [json.loads(line)["step"] for line in (made.path / "commits.jsonl").read_text().splitlines()]
    assert lines == [2, 4, 6, 8]


def test_an_accepted_loss_is_in_the_result_and_the_next_checkpoint_covers_what_is_left(made):
    (made.path / "records" / part_name(1, 0)).unlink()
    (made.path / "metrics.jsonl").write_bytes(
        b"".join(
            line
            for line in (made.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
            if b'p": 3' not in line
        )
    )
    survey = Survey(
        {8: at(made, 8)}, lambda _: True, lambda _: None, lambda it: loss_before(made, it), accept_loss=True
    )
    assert (survey.step, survey.chosen, survey.rejected) == (8, at(made, 8), {})
    said = []
    take_back(made, at(made, 8), 8, survey.losses[at(made, 8)], said.append)
    assert said[0].startswith("warning: continuing without what is lost: metrics.jsonl has ")
    steps_of(made, 9, 10, Committer(made))
    assert loss_before(made, at(made, 10)) is None
    made.finish({"name": "x"})
    (lost,) = made.result()["lost"]
    assert "rows of step 3" in lost
    assert part_name(1, 0) in lost
    (made.path / "records" / part_name(2, 0)).write_bytes(b"")
    assert part_name(2, 0) in loss_before(made, at(made, 10))


def test_an_earlier_checkpoint_is_better_than_an_accepted_loss(made):
    (made.path / "records" / part_name(5, 0)).unlink()
    checkpoints = {step: at(made, step) for step in (8, 6, 4, 2)}
    survey = Survey(checkpoints, lambda _: True, lambda _: None, lambda it: loss_before(made, it), accept_loss=True)
    assert survey.step == 4
    assert list(survey.rejected) == [at(made, 8), at(made, 6)]


def test_a_manifest_without_the_run_s_files_is_accepted_with_a_warning(made):
    old = checkpoint(made.checkpoints, 10)
    assert loss_before(made, old) is None
    said = []
    take_back(made, old, 7, None, said.append)
    assert "checkpoint-10 does not list the run's files, because an older trustrl wrote it" in said[0]
    assert "up to step 7 could not be checked" in said[0]
    assert [row["step"] for row in made.rows()] == list(range(1, 8))
    Committer(made).commit(7, 6)
    (commit,) = [json.loads(line) for line in (made.path / "commits.jsonl").read_text().splitlines()]
    assert len(commit["files"]) == 7, "the next commit lists all files of the record"


def test_files_reach_the_disk_before_the_manifest_that_covers_them(made, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    steps_of(made, 9, 10, Committer(made))
    end = next(index for index, path in enumerate(synced) if "checkpoint-10" in path)
    wanted = [
        "metrics.jsonl",
        "evaluation.jsonl",
        "commits.jsonl",
        f"records/{part_name(8, 0)}",
        f"records/{part_name(9, 0)}",
    ]
    assert {str(made.path / name) for name in wanted} | {str(made.path), str(made.path / "records")} <= set(
        synced[:end]
    )


def dies(recipe, run, progress):
    raise KeyboardInterrupt


def test_each_attempt_keeps_its_environment_and_changes_are_named(tmp_path, monkeypatch, capsys):
    versions = iter([{"trl": "1.0", "torch": "2.1"}, {"trl": "1.1", "torch": "2.1"}, {"torch": "2.1"}])
    described = directory.environment
    monkeypatch.setattr(directory, "environment", lambda: {**described(), "packages": next(versions)})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(small(), tmp_path, resume=True, engine=dies)
    assert "warning: packages.trl is '1.1', was '1.0' in the last attempt" in capsys.readouterr().err
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, resume=True, engine=dies)
    said = capsys.readouterr().err
    assert "warning: packages.trl is not there, was '1.1'" in said
    assert "warning: hosts is 3, was 1" in said
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"] == {"torch": "2.1"}
    assert [attempt["packages"].get("trl") for attempt in environment["earlier"]] == ["1.0", "1.1"]


def test_an_attempt_says_after_which_step_it_resumed(made):
    take_back(made, at(made, 4), 4, None, print)
    environment = json.loads((made.path / "environment.json").read_text())
    assert (environment["resumed_after"], environment["lost"]) == (4, [])


def test_a_damaged_environment_is_said_and_does_not_stop_a_resume(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine=dies)
    (tmp_path / "environment.json").write_bytes(bytes(100))
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, resume=True, engine=dies)
    assert "warning: environment.json is damaged" in capsys.readouterr().err
