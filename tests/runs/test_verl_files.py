"""A run of stock verl 0.9.1, as verl wrote it."""

import json

import pytest

from support.run_files import unpacked
from trustrl.runs.open_run import open_run


@pytest.fixture
def folder(tmp_path):
    return unpacked("verl-0.9.1", tmp_path / "out")


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_folder_has_metrics_settings_evaluations_and_completions(folder):
    run = open_run(folder)
    lines = logged(folder)
    assert (run.status, run.steps, run.row_is) == ("finished", 3, "batch")
    assert [row["reward"] for row in run.rows] == [one["data"]["critic/score/mean"] for one in lines[1:]]
    assert [row["clip_share"] for row in run.rows] == [one["data"]["actor/pg_clipfrac"] for one in lines[1:]]
    assert [row["trustrl/kl_k1"] for row in run.rows] == [one["data"]["actor/ppo_kl"] for one in lines[1:]]
    kept = "training/rollout_probs_diff_mean"  # probabilities, not nats: it keeps its name
    assert [row[kept] for row in run.rows] == [one["data"][kept] for one in lines[1:]]
    assert not any("trustrl/mismatch_abs_mean" in row for row in run.rows)
    settings = run.settings
    assert (settings.engine, settings.loss, settings.updates_per_batch, settings.completions_per_prompt) == (
        "verl", "vanilla", 2, 4,
    )  # fmt: skip
    assert (settings.learning_rate, settings.temperature, settings.top_k, settings.sampler_dtype) == (
        0.003, 1.0, 0, "float32",
    )  # fmt: skip
    assert run.faults == ()


def test_evaluations_know_how_many_samples_they_have(folder):
    run = open_run(folder)
    name = "val-core/trustrl/arithmetic/acc/mean@1"
    assert [(one["step"], one["accuracy"], one["count"]) for one in run.evaluations] == [
        (one["step"], one["data"][name], 8) for one in logged(folder) if name in one["data"]
    ]
    assert [one["step"] for one in run.evaluations] == [0, 2, 3]


def test_completions_come_in_groups_and_have_the_rewards_of_the_metrics(folder):
    run = open_run(folder)
    found = list(run.completions())
    assert len(found) == 3 * 8 * 4
    for row in run.rows:
        batch = [one for one in found if one.step == row["step"]]
        assert sum(one.reward for one in batch) / len(batch) == pytest.approx(row["reward"], abs=1e-6)
        groups = {one.group: {two.prompt for two in batch if two.group == one.group} for one in batch}
        assert len(groups) == 8
        assert all(len(prompts) == 1 for prompts in groups.values())
    assert found[0].advantage is None


def test_the_console_log_alone_has_the_same_numbers(folder):
    """Ray's prefixes, colors, numpy's numbers, and a line that another print runs into."""
    console, file = open_run(folder / "console.log"), open_run(folder / "metrics.jsonl")
    text = (folder / "console.log").read_text()
    assert "(TaskRunnerV1 pid=" in text
    assert "\x1b[36m" in text
    assert "np.float64(2.0)Dumped" in text
    assert console.rows == file.rows
    assert console.evaluations == file.evaluations
    assert console.settings.learning_rate == 0.003
    assert console.settings.updates_per_batch == 2
    assert (console.status, file.status) == ("finished", "unknown")  # the file does not say how many steps there are
    assert {one.what for one in file.missing} >= {"completions", "settings"}


def test_a_plain_log_without_ray_is_read_too(tmp_path):
    (tmp_path / "train.log").write_text(
        "step:1 - actor/pg_loss:0.5 - critic/score/mean:nan - perf/x:-1.5e-07\nnoise step:x - a:1\nstep:2 - actor/pg_loss:inf\n"
    )
    run = open_run(tmp_path)
    assert run.rows == [
        {"step": 1, "loss": 0.5, "reward": None, "perf/x": -1.5e-07},
        {"step": 2, "loss": None},
    ]
    assert run.status == "unknown"


def test_a_log_that_ends_in_a_traceback_failed(folder):
    with (folder / "console.log").open("a") as file:
        file.write("Traceback (most recent call last):\nRayTaskError(ValueError): the sampler died\n")
    run = open_run(folder / "console.log")
    assert run.status == "failed"
    assert run.last_words.endswith("the sampler died")


def test_settings_come_from_hydra_without_the_console_log(folder):
    (folder / "console.log").unlink()
    run = open_run(folder)
    assert run.settings.learning_rate == 0.003
    assert any("config.yaml" in one for one in run.found)


def test_dumps_alone_are_a_run_without_metrics(folder):
    run = open_run(folder / "rollouts")
    assert (run.rows, len(list(run.completions()))) == ([], 96)
    assert "metrics" in {one.what for one in run.missing}


def test_a_trustrl_loss_names_its_region(tmp_path):
    (tmp_path / "a.log").write_text(
        "{'actor_rollout_ref': {'actor': {'optim': {'lr': 1e-06}, 'policy_loss': {'loss_mode': 'trustrl-dppo-binary-tv'}}}}\n"
        "step:1 - actor/pg_loss:0.5 - actor/ppo_kl:0.2 - actor/trustrl/kl_k1:0.1\n"
    )
    run = open_run(tmp_path)
    assert run.settings.region["kind"] == "dppo"
    assert run.rows == [{"step": 1, "loss": 0.5, "trustrl/kl_k1": 0.1}]  # the region's own metric wins


def test_a_truncated_line_is_named_and_the_rest_is_read(folder):
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-500])
    run = open_run(file)
    assert run.steps == 2
    assert run.faults == ("metrics.jsonl, line 4: the last line is truncated; left out",)
