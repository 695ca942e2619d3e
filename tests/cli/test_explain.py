"""`trustrl explain`: data on stdout, exit codes."""

import json

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import main

EQUAL = {"frac_reward_zero_std": 1.0, "reward": 0.0}


def test_a_healthy_run_ends_with_0_and_says_so(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a"))]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("nothing found\n", "")


def test_a_finding_ends_with_1_and_its_numbers(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a", rows=steps(8, **EQUAL)))]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1. no learning signal (confidence 1.00)")
    assert "frac_reward_zero_std (from step" in said
    assert "fix: " in said


def test_json_has_every_part_of_a_finding(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a", rows=steps(8, **EQUAL))), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["name"] == "no learning signal"
    assert found["numbers"][0]["value"] == 1.0
    assert {"order", "confidence", "reason", "numbers", "action"} <= set(found)
    assert {"metric", "step", "limit", "side", "what", "healthy"} <= set(found["numbers"][0])


def test_json_of_a_healthy_run_has_no_finding(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "RUN", id="no run"),
        pytest.param(["nowhere"], "must be a run directory that `trustrl run` created", id="no folder"),
    ],
)
def test_wrong_usage_ends_with_2(arguments, said, capsys):
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("left", [pytest.param("", id="empty"), pytest.param(None, id="missing")])
def test_a_run_without_metrics_ends_with_1_and_says_so(tmp_path, left, capsys):
    folder = run_folder(tmp_path / "a", rows=[], finished=False)
    if left is None:
        (folder / "metrics.jsonl").unlink()
    assert main(["explain", str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "has no metrics: it ended before its first step" in said.err


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_a_recipe_that_was_cut_ends_with_1(tmp_path, verb, capsys):
    folder = run_folder(tmp_path / "a")
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text[: text.index("=") + 2])
    assert main([verb, str(folder)]) == 1
    assert "recipe.toml" in capsys.readouterr().err


def test_a_broken_file_ends_with_1_and_a_sentence(tmp_path, capsys):
    folder = run_folder(tmp_path / "a")
    (folder / "metrics.jsonl").write_text("no JSON\n")
    assert main(["explain", str(folder)]) == 1
    assert "must be JSON" in capsys.readouterr().err
