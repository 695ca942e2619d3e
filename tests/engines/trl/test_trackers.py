"""A recipe's tracker has the numbers of metrics.jsonl, in files of the run directory, and nothing is sent anywhere."""

import contextlib
import json
import os
import socket
import sqlite3

import numpy as np
import pytest

pytest.importorskip("trl")

from support.tracked_metrics import READERS
from trustrl.runner.recipe import load
from trustrl.runner.run_recipe import run
from trustrl.tools.dashboards import DASHBOARDS

SMALL = ["schedule.steps=2", "schedule.checkpoint_every=2", "evaluation.count=1"]
OFFLINE_LOCATIONS = (
    "TENSORBOARD_LOGGING_DIR", "TENSORBOARD_DIR", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "TRACKIO_DIR", "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME",
)  # fmt: skip
AS_STORED = {"tensorboard": np.float32}  # TensorBoard keeps 32 bits


@pytest.fixture
def nothing_leaves(monkeypatch):
    """Fails a connection to any other machine that this process makes. wandb's Go process is not seen by it."""
    connect = socket.socket.connect

    def local_only(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    for name in OFFLINE_LOCATIONS:
        monkeypatch.delenv(name, raising=False)


def of(tracker):
    return [name for name in os.environ if name.startswith(tracker.upper())]


@pytest.mark.parametrize("tracker", READERS)
def test_the_tracker_has_the_numbers_of_the_metrics_file(tracker, tmp_path, nothing_leaves, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not of(tracker)
    run(load("sanity", [f"logging.tracker={tracker}", *SMALL]), tmp_path / "run")
    assert capfd.readouterr().out == ""  # stdout is for data
    assert not of(tracker)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = READERS[tracker](tmp_path / "run")
    prefix = "" if tracker == "mlflow" else "train/"
    stored = AS_STORED.get(tracker, float)
    for row in rows:
        ours = {name: value for name, value in row.items() if name.startswith("trustrl/") or name == "loss"}
        assert len(ours) > 50
        assert {name: found[prefix + name][row["step"]] for name in ours} == {
            name: stored(value) for name, value in ours.items()
        }
    assert [row["step"] for row in rows] == [1, 2]
    if tracker == "mlflow":
        check_grafanas_queries(tmp_path / "run/mlflow.db", rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def check_grafanas_queries(database, rows):
    """The dashboard's SQL on the tables that MLflow made. It is written for PostgreSQL, and SQLite understands it too."""
    dashboard = json.loads(DASHBOARDS["grafana"]())
    with contextlib.closing(sqlite3.connect(database)) as mlflow:
        variables = {one["name"]: one["query"] for one in dashboard["templating"]["list"]}
        ((name, run_id),) = mlflow.execute(variables["run"]).fetchall()
        assert name == "sanity"
        seen = set()
        for panel in (panel for panel in dashboard["panels"] if panel["type"] == "trend"):
            read = mlflow.execute(panel["targets"][0]["rawSql"].replace("$run", run_id))
            columns = [column[0] for column in read.description]
            assert columns[0] == panel["options"]["xField"]
            found = {values[0]: dict(zip(columns[1:], values[1:], strict=True)) for values in read}
            for row in (row for row in rows if row["step"] in found):  # TRL logs a reward at a batch's first update
                for column, value in found[row["step"]].items():
                    assert value == row.get(f"trustrl/{column}", row.get(column)), column
                    seen.add(column)
    assert {"masked_share", "kl_k3", "entropy", "divergence_p99", "staleness_mean", "grad_norm", "reward"} <= seen


def test_only_the_core_is_logged_if_the_recipe_says_so(tmp_path):
    run(load("sanity", ["logging.metrics=core", *SMALL]), tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert {name for name in row if name.startswith("trustrl/")} == {
        "trustrl/masked_share", "trustrl/kl_k3", "trustrl/divergence_mean", "trustrl/divergence_p99",
        "trustrl/entropy", "trustrl/dropped_share", "trustrl/mismatch_abs_mean", "trustrl/mismatch_ratio_mean",
        "trustrl/staleness_mean",
    }  # fmt: skip


def test_the_users_own_variables_win(tmp_path, monkeypatch, nothing_leaves):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    run(load("sanity", ["logging.tracker=tensorboard", *SMALL]), tmp_path / "run")
    assert list((tmp_path / "mine").glob("events.out.tfevents.*"))
    assert not list((tmp_path / "run").glob("tensorboard/events.out.tfevents.*.vm.*"))
