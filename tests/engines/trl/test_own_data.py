"""A stranger's data on TRL: `trustrl run` on a JSONL file and a reward function, and what a plan refuses."""

import subprocess
import sys

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

from support import stranger
from support.tiny_models import save_model
from support.trl_commands import environment
from trustrl.cli import main
from trustrl.runner.trl_arguments import config_fields


@pytest.mark.xdist_group("own data")
def test_a_jsonl_file_and_a_function_of_ten_lines_are_trained_on(tmp_path):
    save_model(tmp_path / "model", tied=True)
    rows = stranger.write(tmp_path, model=tmp_path / "model", engine="trl")
    adapters = ["lora.rank=2", "advantage.divide_by_std=false", "loss.reduction=constant"]
    command = [sys.executable, "-m", "trustrl.cli", "run", "mine.toml", *adapters, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stranger.check_run(tmp_path / "run", tmp_path, rows)
    assert list((tmp_path / "run/checkpoints/checkpoint-2").glob("adapter_model*"))


def test_the_fields_of_the_configuration_are_read_without_importing_it():
    from dataclasses import fields

    from trl import GRPOConfig

    assert set(config_fields()) == {field.name for field in fields(GRPOConfig)}


def test_a_plan_refuses_a_field_that_the_configuration_lacks(capsys):
    assert main(["plan", "tour", "engine.settings.learning_rat=1"]) == 2
    assert (
        "must be fields of TRL's GRPOConfig, got 'learning_rat'. Did you mean 'learning_rate'?"
        in capsys.readouterr().err
    )
