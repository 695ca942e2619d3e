"""Runs of stock TRL, 1.16.0 and 1.0.0, as TRL wrote them."""

import json
import warnings

import pytest

from support.run_files import unpacked
from trustrl.runs.open_run import open_run

VERSIONS = ("trl-1.16.0", "trl-1.0.0")


@pytest.fixture(params=VERSIONS)
def folder(request, tmp_path):
    return unpacked(request.param, tmp_path / "out")


def test_an_output_dir_has_metrics_settings_and_an_end(folder):
    run = open_run(folder)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert (run.status, run.steps, run.row_is, run.steps_per_row) == ("finished", 6, "update", 1)
    assert [row["loss"] for row in run.rows] == [one["loss"] for one in history if "loss" in one]
    assert [row["clip_share"] for row in run.rows] == [
        one["clip_ratio/region_mean"] for one in history if "loss" in one
    ]
    assert run.rows[0]["completion_length"] == history[0]["completions/mean_length"]
    assert run.rows[0]["completions/max_length"] == history[0]["completions/max_length"]  # no name of ours
    assert run.seconds == history[-1]["train_runtime"]
    assert not any("train_loss" in row for row in run.rows)
    settings = run.settings
    assert (settings.engine, settings.updates_per_batch, settings.completions_per_prompt) == ("trl", 2, 3)
    assert settings.engine_version == folder.parent.name or settings.engine_version in ("1.16.0", "1.0.0")
    assert (settings.steps_planned, settings.learning_rate) == (6, pytest.approx(1e-3))
    assert run.faults == ()


def test_evaluations_have_the_score_as_accuracy(folder):
    run = open_run(folder)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [(one["step"], one["accuracy"]) for one in run.evaluations] == [
        (one["step"], one["eval_reward"]) for one in history if "eval_reward" in one
    ]
    assert [one["step"] for one in run.evaluations] == [3, 6]
    assert not any(name.startswith("eval_") for row in run.rows for name in row)


def test_completions_are_those_trained_on_each_once(folder):
    """TRL stores the batch of step 1 again at step 2, and samples of the evaluation at steps 3, 4 and 6."""
    run = open_run(folder)
    found = list(run.completions())
    steps = [1, 5] if "1.16" in run.settings.engine_version else [1]  # the data has three files of 1.0.0
    assert [one.step for one in found] == [step for step in steps for _ in range(6)]
    assert any("validation samples" in one for one in run.found)
    for step in steps:
        batch = [one for one in found if one.step == step]
        (row,) = [row for row in run.rows if row["step"] == step]
        assert sum(one.reward for one in batch) / 6 == pytest.approx(row["reward"], abs=1e-5)
        assert [one.group for one in batch] == [f"{step}/{group}" for group in (0, 0, 0, 1, 1, 1)]
        for group in (batch[:3], batch[3:]):
            assert len({one.prompt for one in group}) == 1
            assert sum(one.advantage for one in group) == pytest.approx(0, abs=1e-4)
    assert set(found[0].rewards) == {"length", "letters"}
    assert found[0].reward == pytest.approx(sum(found[0].rewards.values()))


def test_the_arguments_come_from_tensorboard(tmp_path):
    run = open_run(unpacked("trl-1.16.0", tmp_path))
    assert (run.settings.temperature, run.settings.top_k, run.settings.loss) == (0.9, 50, "dapo")
    assert "settings" not in {one.what for one in run.missing}
    assert any(one.startswith("metrics from TRL trainer_state.json") for one in run.found)


def test_without_a_tracker_the_settings_are_missing_and_the_pickle_is_named(tmp_path):
    run = open_run(unpacked("trl-1.0.0", tmp_path))
    (found,) = [one for one in run.missing if one.what == "settings"]
    assert "pickle" in found.how
    assert run.settings.temperature is None
    assert {one.what for one in run.missing} >= {"sampler-trainer mismatch", "token records"}


def test_a_pickle_is_never_opened(tmp_path):
    folder = unpacked("trl-1.0.0", tmp_path)
    (folder / "training_args.bin").write_bytes(b"cposix\nsystem\n(S'touch owned'\ntR.")
    assert open_run(folder).rows
    assert not (tmp_path / "owned").exists()


def test_the_newest_checkpoint_counts_if_the_folder_has_no_state(tmp_path):
    folder = unpacked("trl-1.16.0", tmp_path)
    (folder / "trainer_state.json").unlink()
    for file in (folder / "runs").rglob("*tfevents*"):
        file.unlink()
    run = open_run(folder)
    assert (run.steps, run.status, run.settings.steps_planned) == (4, "unfinished", 6)


def test_a_broken_state_is_a_fault_and_the_checkpoint_before_it_is_read(tmp_path):
    folder = unpacked("trl-1.16.0", tmp_path)
    text = (folder / "trainer_state.json").read_text()
    (folder / "trainer_state.json").write_text(text[: len(text) // 2])
    for file in (folder / "runs").rglob("*tfevents*"):
        file.unlink()
    run = open_run(folder)
    assert run.steps == 4
    assert run.faults == ("trainer_state.json: not valid JSON; left out",)


def test_the_richest_metrics_win(tmp_path):
    """The state of step 4 has fewer steps than the events."""
    folder = unpacked("trl-1.16.0", tmp_path)
    (folder / "trainer_state.json").unlink()
    run = open_run(folder)
    assert run.steps == 6
    assert any(one.startswith("metrics from TensorBoard events; not from TRL trainer_state.json") for one in run.found)


def test_several_reward_functions_without_metrics_have_no_sum(tmp_path):
    """Their weights are unknown."""
    folder = unpacked("trl-1.16.0", tmp_path)
    run = open_run(folder / "completions/completions_00001.parquet")
    assert [one.reward for one in run.completions()] == [None] * 6
    assert all(len(one.rewards) == 2 for one in run.completions())


def test_a_damaged_file_of_completions_is_named_and_the_others_are_read(tmp_path):
    folder = unpacked("trl-1.16.0", tmp_path)
    file = folder / "completions/completions_00001.parquet"
    file.write_bytes(file.read_bytes()[:2000])
    run = open_run(folder)
    assert any("completions_00001.parquet" in one for one in run.faults)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one.step for one in run.completions()] == [2] * 6 + [5] * 6
