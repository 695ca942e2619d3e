"""`trustrl run --resume` with the real TRL after a power failure lost writes that had not reached the disk."""

import json
import shutil

import pytest

pytest.importorskip("trl")
pq = pytest.importorskip("pyarrow.parquet")

from support.trl_commands import run
from trustrl.recording.part_names import PartName
from trustrl.runner.directory import RunDirectory

pytestmark = pytest.mark.xdist_group("lost writes")
SETTINGS = ["schedule.steps=8", "schedule.checkpoint_every=2", "evaluation.count=16", "optimiser.learning_rate=3e-3"]
KEPT = ["engine.settings.save_total_limit=9"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that nobody interrupted, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run("run", *SETTINGS, *KEPT, "--out", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def killed(finished, tmp_path):
    """A copy of it without the last checkpoint and the result."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-8")
    return folder


def resumed(folder, *more):
    return run("run", *SETTINGS, *KEPT, "--out", folder, "--resume", *more)


def result_of(folder):
    return RunDirectory(folder).result() | {"seconds": 0}


def rows_of(folder):
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in RunDirectory(folder).rows()]
    return rows, RunDirectory(folder).rows("evaluation")


def without_rows(folder, steps):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] not in steps))


def part(folder, step, attempt=1):
    return folder / "records" / str(PartName(step, step, 0, attempt))


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def test_a_run_that_lost_rows_and_records_before_its_checkpoints_is_refused_with_their_names(killed):
    """With checkpoint 6 alone, rows 3 to 6, all evaluations and two record files gone."""
    for step in (2, 4):
        shutil.rmtree(killed / "checkpoints" / f"checkpoint-{step}")
    without_rows(killed, range(3, 7))
    (killed / "evaluation.jsonl").write_text("")
    zero(part(killed, 1))
    part(killed, 3).unlink()
    before = sorted(path.name for path in killed.rglob("*"))
    done = resumed(killed)
    assert done.returncode == 1, done.stderr[-3000:]
    for words in (
        "No intact checkpoint is left to resume from.", "lost are the rows of steps 3 to 6",
        "evaluation.jsonl has 0 bytes", "lost are the rows of step 0",
        "records/step-00000001.rank-0000.parquet has changed since it was committed",
        "records/step-00000003.rank-0000.parquet is missing", "--accept-loss", "Restore the files from a copy",
    ):  # fmt: skip
        assert words in done.stderr, words
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in killed.rglob("*")) == before, "nothing is renamed or dropped"
    done = resumed(killed, "--accept-loss")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: continuing without what is lost: " in done.stderr
    (lost,) = result_of(killed)["lost"]
    assert "steps 3 to 6" in lost
    assert "step-00000003" in lost


def test_an_earlier_checkpoint_is_used_if_only_later_rows_and_records_are_lost(killed, finished):
    without_rows(killed, range(5, 9))
    zero(part(killed, 4))
    done = resumed(killed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checkpoint-6 is not used: metrics.jsonl has" in done.stderr
    assert "resuming after step 4" in done.stderr
    assert rows_of(killed) == rows_of(finished)
    assert result_of(killed) == result_of(finished)
    assert not part(killed, 4).exists(), "it is in superseded/"
    assert pq.read_table(part(killed, 4, attempt=2)).equals(pq.read_table(part(finished, 4)))


def test_what_lies_behind_the_commit_point_is_dropped_and_kept_next_to_it(killed, finished):
    """Also lines that cannot be read: nothing had promised that they reach the disk."""
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(bytes(100) + b'\n{"step": 9}\n{"ste')
    done = resumed(killed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "took back 5 rows of metrics.jsonl after step 6; metrics.jsonl.dropped keeps them" in done.stderr
    assert (killed / "metrics.jsonl.dropped").read_bytes().endswith(b'{"step": 9}\n{"ste\n')
    assert rows_of(killed) == rows_of(finished)
    assert result_of(killed) == result_of(finished)


def test_a_resume_names_what_changed_in_the_environment_and_keeps_the_earlier_one(killed):
    file = killed / "environment.json"
    environment = json.loads(file.read_text())
    version = environment["packages"]["trl"]
    environment["packages"]["trl"] = "0.1.2"
    file.write_text(json.dumps(environment))
    done = resumed(killed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"warning: packages.trl is '{version}', was '0.1.2' in the last attempt" in done.stderr
    attempts = json.loads(file.read_text())
    assert attempts["packages"]["trl"] == version
    assert [attempt["packages"]["trl"] for attempt in attempts["earlier"]] == ["0.1.2"]


def test_a_checkpoint_of_an_older_trustrl_is_used_with_a_warning(killed, finished, monkeypatch):
    from trustrl.runner.manifests import MANIFEST, Seal
    from trustrl.runner.signing import load_key

    seal = Seal(load_key(print), RunDirectory(killed).run_id)
    manifest = killed / "checkpoints" / "checkpoint-6" / MANIFEST
    content = json.loads(manifest.read_text()) | {"version": 1}
    for name in ("run_files", "hmac"):
        del content[name]
    manifest.write_text(json.dumps({**content, "hmac": seal.key.signature(content)}))
    done = resumed(killed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checkpoint-6 does not list the run's files, because an older trustrl wrote it" in done.stderr
    assert "could not be checked" in done.stderr
    assert result_of(killed) == result_of(finished)
