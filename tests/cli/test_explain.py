"""`trustrl explain`: data on stdout, exit codes."""

import json

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import main

EQUAL = {"frac_reward_zero_std": 1.0, "reward": 0.0}


def test_a_healthy_run_ends_with_0_and_says_so(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a"))]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("nothing found. Checked: non-finite values, ")
    assert "\n\nnot checked:\n- " in said.out
    assert said.out.endswith("read:\n- 8 rows of metrics in metrics.jsonl\n- 2 evaluations in evaluation.jsonl\n")
    assert said.err == ""


def test_a_finding_ends_with_1_and_its_numbers(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a", rows=steps(8, **EQUAL)))]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1. no learning signal (symptom, confidence 1.00)")
    assert "- frac_reward_zero_std 1, above 0.9" in said
    assert "metrics.jsonl, from step 1; healthy" in said
    assert "fix: " in said


def test_json_has_every_part_of_a_finding(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a", rows=steps(8, **EQUAL))), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["name"] == "no learning signal"
    assert found["numbers"][0]["value"] == 1.0
    assert found["numbers"][0]["file"] == "metrics.jsonl"
    assert {"order", "kind", "change", "confidence", "reason", "numbers", "action"} <= set(found)
    assert {"metric", "step", "limit", "side", "what", "healthy"} <= set(found["numbers"][0])


def test_json_of_a_healthy_run_has_no_finding_and_lists_what_was_not_checked(tmp_path, capsys):
    assert main(["explain", str(run_folder(tmp_path / "a")), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["findings"], said["gap"]) == ([], [])
    missing = {one["what"]: one for one in said["unchecked"]}
    assert {"completions/clipped_ratio", "token records"} <= {*missing}
    assert all({"what", "would_tell", "how"} == {*one} for one in missing.values())


def test_several_runs_have_a_heading_each_and_one_finding_is_enough_for_1(tmp_path, capsys):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", rows=steps(8, **EQUAL))]
    assert main(["explain", *map(str, folders)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{folders[0]}\n\nnothing found. Checked: ")
    assert f"\n{folders[1]}\n\n1. no learning signal" in said
    assert main(["explain", *map(str, folders), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(one["findings"]) for one in lines] == [0, 1]


def test_a_trl_output_folder_is_explained_from_its_trainer_state(tmp_path, capsys):
    history = [
        {"step": step, "epoch": 0.1, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-6, "num_tokens": 10.0 * step}
        | {"reward": 0.0, "frac_reward_zero_std": 1.0, "entropy": 0.4, "completions/mean_length": 5.0}
        for step in range(1, 13)
    ]
    checkpoint = tmp_path / "checkpoint-12"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 12, "log_history": history}))
    assert main(["explain", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1. no learning signal (symptom, confidence 1.00)")
    assert "checkpoint-12/trainer_state.json, from step 1" in said
    assert "- sampler-trainer mismatch: Does the sampler have stale weights" in said
    assert "- settings: " in said


def test_a_verl_log_file_is_explained(tmp_path, capsys):
    lines = [
        {"step": step, "data": {"critic/score/mean": 0.5 if step < 4 else 0.01, "actor/pg_loss": 0.1,
         "actor/grad_norm": 1.0, "actor/ppo_kl": 0.02, "actor/entropy": 0.5, "rollout_corr/kl": 0.3 * (step > 1),
         "rollout_corr/k3_kl": 0.3 * (step > 1)}}
        for step in range(1, 9)
    ]  # fmt: skip
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["explain", str(file)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1. stale weights")
    assert "- updates per batch: Are there too many updates on each batch?" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "RUN", id="no run"),
        pytest.param(["nowhere"], "RUN must be a folder or file that exists, got nowhere", id="no folder"),
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
