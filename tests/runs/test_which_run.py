"""The run that a folder stands for: one, or a list to choose from, or the nearest one."""

import json
import shutil
from pathlib import Path

import pytest

from support.run_folders import run_folder
from trustrl.cli import main
from trustrl.errors import ConfigError
from trustrl.runs.open_run import open_run

EVENTS = next((Path(__file__).parent / "data/tensorboard-2.21.0").iterdir())
VERL_ROW = json.dumps({"step": 1, "data": {"critic/score/mean": 0.5, "actor/pg_loss": 0.1}}) + "\n"


def events(folder):
    folder.mkdir(parents=True)
    shutil.copy(EVENTS, folder)


def verl_log(folder):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(VERL_ROW)


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_a_fixture_deep_in_a_checkout_is_not_read_but_named(tmp_path, verb, capsys):
    (tmp_path / "pyproject.toml").touch()
    events(tmp_path / "tests/runs/data/tensorboard")
    assert main([verb, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "which is not one. The nearest one is tests/runs/data/tensorboard inside it." in said.err


@pytest.mark.parametrize("make", [events, verl_log, run_folder], ids=["events", "verl logs", "run directories"])
def test_a_folder_of_several_runs_lists_them_and_asks_for_one(tmp_path, make):
    for name in ("a", "b"):
        make(tmp_path / name)
    with pytest.raises(ConfigError, match=r"a folder of runs\. Pass one of a, b inside it"):
        open_run(tmp_path)


def test_many_runs_are_counted(tmp_path):
    for number in range(12):
        verl_log(tmp_path / f"run-{number:02}")
    with pytest.raises(ConfigError, match="run-09 and 2 more inside it"):
        open_run(tmp_path)


@pytest.mark.parametrize("below", ["runs/Nov17_host", "tensorboard_log/project/name"])
def test_the_folders_that_a_tracker_makes_belong_to_the_run(tmp_path, below):
    events(tmp_path / below)
    assert open_run(tmp_path).rows


def test_a_folder_inside_a_run_names_the_run(tmp_path):
    inside = run_folder(tmp_path / "a") / "notes"
    inside.mkdir()
    with pytest.raises(ConfigError, match=r"which is not one\. The nearest one is .*a\."):
        open_run(inside)


def test_every_answer_names_the_files_it_read(tmp_path, capsys):
    verl_log(tmp_path / "run")
    for verb in ("explain", "report"):
        main([verb, str(tmp_path / "run")])
        assert "1 row of metrics in metrics.jsonl" in capsys.readouterr().out
