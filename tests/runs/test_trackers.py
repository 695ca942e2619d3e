"""Runs that trackers stored: files of the real packages, committed and, where a package is installed, written here."""

import csv
import json
import sqlite3

import pytest

from support.run_files import unpacked
from support.tracker_files import WRITERS, row
from trustrl.errors import ConfigError
from trustrl.runs.open_run import open_run

FOLDERS = ("wandb-0.31.0", "trackio-0.43.0", "mlflow-3.17.2", "tensorboard-2.21.0")
PACKAGES = {
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "mlflow-files": "mlflow",
    "tensorboard": "tensorboard",
}


def check(run, *, settings=True):
    """Compares a run with the metrics that the tracker was given."""
    names = {"loss": "train/loss", "reward": "train/reward", "grad_norm": "train/grad_norm",
             "completion_length": "train/completions/mean_length", "num_tokens": "train/num_tokens"}  # fmt: skip
    assert [found["step"] for found in run.rows] == [1, 2, 3, 4, 5]
    for found in run.rows:
        given = row(found["step"])
        for ours, theirs in names.items():
            lost = (ours, found["step"]) in (("loss", 4), ("grad_norm", 5))
            assert found[ours] is None if lost else found[ours] == pytest.approx(given[theirs], rel=1e-6)
    assert [(one["step"], pytest.approx(one["accuracy"])) for one in run.evaluations] == [(2, 0.1), (4, 0.2)]
    assert run.settings.engine == "trl"
    if settings:
        assert (run.settings.updates_per_batch, run.settings.learning_rate) == (2, 1e-6)
        assert (run.settings.temperature, run.settings.completions_per_prompt) == (0.8, 8)
        assert run.name == "tiny"
    assert run.faults == ()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_committed_run_is_what_the_tracker_was_given(name, tmp_path):
    folder = unpacked(name, tmp_path)
    if name.startswith("mlflow"):
        check(open_run(folder / "mlflow.db"))
        check(open_run(folder / "mlruns"))
    else:
        check(open_run(folder), settings=not name.startswith("tensorboard"))
    if name.startswith("trackio"):
        check(open_run(folder / "tiny-project.parquet"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_written_here_is_what_the_tracker_was_given(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # both are read on import
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip(PACKAGES[name])
    WRITERS[name](tmp_path)
    check(open_run(tmp_path), settings=name != "tensorboard")


def test_wandb_joins_nested_keys_and_leaves_out_what_is_not_a_number(tmp_path):
    run = open_run(unpacked("wandb-0.31.0", tmp_path))
    assert [found["nested/inner/deep"] for found in run.rows] == [2, 4, 6, 8, 10]
    assert not any("text" in name or "counts" in name for found in run.rows for name in found)
    assert run.status == "finished"


def test_the_log_that_wandb_links_into_a_run_is_not_a_fault(tmp_path):
    (tmp_path / "core.log").write_text("{}\n")
    folder = unpacked("wandb-0.31.0", tmp_path / "run")
    logs = next(folder.rglob("*.wandb")).parent / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "core.log")
    check(open_run(folder))
    check(open_run(logs.parent))
    (logs / "another.log").symlink_to(tmp_path / "core.log")
    assert [fault.split(": ")[1] for fault in open_run(folder).faults] == [
        "a link that leads out of the folder; left out"
    ]


def test_several_wandb_runs_are_refused_by_name(tmp_path):
    folder = unpacked("wandb-0.31.0", tmp_path / "one")
    unpacked("wandb-0.31.0", tmp_path / "two")
    assert open_run(folder).steps == 5
    with pytest.raises(ConfigError, match=r"a folder of runs\. Pass one of one"):
        open_run(tmp_path)


def test_one_of_several_runs_in_a_database_is_chosen_by_name(tmp_path):
    file = unpacked("trackio-0.43.0", tmp_path) / "tiny-project.db"
    with sqlite3.connect(file) as database:
        database.execute(
            "insert into metrics (run_id, timestamp, run_name, step, metrics) values ('b', 't', 'other', 1, '{\"loss\": 2.0}')"
        )
    with pytest.raises(ConfigError, match="Append :: and one of: tiny, other"):
        open_run(file)
    assert open_run(f"{file}::other").rows == [{"step": 1, "loss": 2.0}]
    assert open_run(f"{file}::tiny").steps == 5
    with pytest.raises(ConfigError, match="one of tiny, other, got third"):
        open_run(f"{file}::third")


def test_reading_a_database_changes_nothing(tmp_path):
    file = unpacked("trackio-0.43.0", tmp_path) / "tiny-project.db"
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    open_run(file)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_two_folders_of_events_are_two_runs(tmp_path):
    unpacked("tensorboard-2.21.0", tmp_path / "a")
    unpacked("tensorboard-2.21.0", tmp_path / "b")
    with pytest.raises(ConfigError, match="Pass one of a, b inside it"):
        open_run(tmp_path)


def test_events_of_a_resumed_run_in_trls_folder_belong_together(tmp_path):
    folder = unpacked("trl-1.16.0", tmp_path)
    (events,) = (folder / "runs").rglob("*tfevents*")
    later = folder / "runs/later" / events.name.replace("1794885545", "1794885999")
    later.parent.mkdir()
    later.write_bytes(events.read_bytes())
    assert open_run(folder).steps == 6


@pytest.mark.parametrize("kind", ["csv", "json", "columns", "jsonl"])
def test_an_exported_history_is_read(kind, tmp_path):
    rows = [
        {"_step": step, **{k: v for k, v in row(step).items() if v == v and v != float("inf")}}
        for step in (1, 2, 3, 4, 5)
    ]
    file = tmp_path / f"history.{'json' if kind == 'columns' else kind}"
    if kind == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "columns":
        file.write_text(json.dumps({name: {str(at): one.get(name) for at, one in enumerate(rows)} for name in rows[0]}))
    else:
        file.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(one) + "\n" for one in rows))
    run = open_run(file)
    assert [(one["step"], one["reward"]) for one in run.rows] == [(step, step / 10) for step in (1, 2, 3, 4, 5)]
    assert run.settings.engine == "trl"
    assert open_run(tmp_path).rows == run.rows


def test_columns_of_a_panel_are_the_metrics(tmp_path):
    """As the W&B page exports a chart."""
    (tmp_path / "panel.csv").write_text(
        '"Step","my-run - train/reward","my-run - train/num_tokens"\n"1","0.5","7"\n"2","0.75",""\n'
    )
    assert open_run(tmp_path / "panel.csv").rows == [
        {"step": 1, "reward": 0.5, "num_tokens": 7.0}, {"step": 2, "reward": 0.75},
    ]  # fmt: skip
