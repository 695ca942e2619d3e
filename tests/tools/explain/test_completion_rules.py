"""Causes in completions, in their lengths, and in a reward that held-out problems contradict."""

import json
import math

import pytest

from support.explained_runs import MISMATCH, names, run_of
from support.run_folders import write_records
from trustrl.runs.run import Completion
from trustrl.tools.explain import explain

BATCHES = 10


def sampled(change, batches=BATCHES, groups=4, each=2):
    """Completions of a healthy run with a change for some, by step, group and place."""
    made = []
    for step in range(1, 4 * batches, 4):
        for group in range(groups):
            for place in range(each):
                fields = {"prompt": f"{step}/{group}?", "text": f"answer {place} of {step}", "reward": float(place)}
                fields |= change(step, group, place)
                made.append(Completion(step=step, group=f"{step}/{group}", **fields))
    return {"completions": lambda: iter(made)}


def test_healthy_completions_have_no_finding():
    found = explain(run_of(**sampled(lambda *place: {})))
    assert found.causes == []
    assert {"lost rewards", "duplicated data"} <= {*found.checked}
    assert "lost rewards" not in explain(run_of()).checked


def test_completions_whose_reward_was_dropped_are_found_without_a_metric():
    gone = {"reward": None, "rewards": {"exact": None}}
    (found,) = explain(
        run_of(
            lambda row: {"frac_reward_nan": "gone"},
            **sampled(lambda step, group, place: gone if group == 1 and step > 9 else {}),
        )
    ).causes
    assert (found.name, found.order.name, found.step) == ("lost rewards", "INPUT", 13)
    assert found.numbers[0].value == 0.25
    assert found.numbers[0].file == "completions"


def test_nan_in_a_parquet_file_of_stock_trl_is_a_lost_reward(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from trustrl.runs.open_run import open_run

    (tmp_path / "completions").mkdir()
    history = [{"step": step, "reward": 0.5, "frac_reward_zero_std": 0.0, "num_tokens": 9.0} for step in (1, 2)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "logging_steps": 1}))
    for step, value in ((1, 0.5), (2, math.nan)):
        columns = {
            "step": [step] * 4, "prompt": ["a", "a", "b", "b"], "completion": [f"{letter}{step}" for letter in "wxyz"],
            "exact": [1.0, 0.0, value, 1.0], "advantage": [1.0, -1.0, 0.0, 0.5],
        }  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / f"completions/completions_{step:05}.parquet")
    (found,) = explain(open_run(tmp_path)).causes
    assert (found.name, found.step, found.numbers[0].value) == ("lost rewards", 2, 0.25)


def test_runs_that_store_no_rewards_at_all_lost_none():
    assert names(run_of(**sampled(lambda *place: {"reward": None}))) == []


def test_prompts_that_a_batch_repeats_are_duplicated_data():
    assert names(run_of(**sampled(lambda step, group, place: {"prompt": f"{step}/{group // 2}?"}))) == [
        "duplicated data"
    ]
    assert names(run_of(**sampled(lambda step, group, place: {"prompt": f"{group}?"}))) == []  # another epoch


def shrinking(row):
    return {"completion_length": 100.0 * math.exp(-row["step"] / 8), "reward": 0.3}


def test_completions_that_shrink_without_a_gain_are_a_length_collapse():
    assert names(run_of(shrinking)) == ["length collapse"]
    assert names(run_of(lambda row: {**shrinking(row), "reward": 0.3 + row["step"] / 100})) == []


FELL, ROSE = [(0, 0.4, 500), (40, 0.2, 500)], [(0, 0.4, 500), (40, 0.5, 500)]


def test_a_reward_that_rises_while_accuracy_falls_is_found_only_with_evaluations():
    assert names(run_of(evaluations=FELL)) == ["reward contradicts held-out accuracy"]
    assert names(run_of(evaluations=ROSE)) == []
    assert names(run_of()) == []


def test_completions_that_grow_explain_the_contradiction():
    growing = run_of(lambda row: {"completion_length": 20.0 + 4 * row["step"]}, evaluations=FELL)
    assert names(growing) == ["length hacking"]
    assert names(run_of(lambda row: {"completion_length": 20.0 + 4 * row["step"]})) == []


def test_a_collapse_of_the_entropy_names_the_completion_that_is_left():
    run = run_of(
        lambda row: {"trustrl/entropy": 0.5 * math.exp(-row["step"] / 8), "reward": 0.3},
        **sampled(lambda step, group, place: {"text": "aaa"} if group else {}),
    )
    (found,) = explain(run).causes
    assert "At step 37, 75% of 8 are 'aaa'." in found.reason


@pytest.mark.parametrize(("first", "found"), [(2.0, "wrong chat template"), (0.5, "tied head not synced")])
def test_a_gap_at_the_first_tokens_alone_is_another_prompt(tmp_path, first, found):
    pytest.importorskip("pyarrow")
    pytest.importorskip("torch")
    count, length = 400, 8
    gaps = [(first if at % length == 0 else 0.05) * (1 if at % 16 < 8 else -1) for at in range(count)]
    columns = {
        "behavior_logp": [-1.0 - at % 7 / 10 for at in range(count)],
        "proximal_logp": [-1.0 - at % 7 / 10 + gap for at, gap in enumerate(gaps)],
        "position": [at % length for at in range(count)], "sequence": [at // length for at in range(count)],
    }  # fmt: skip
    write_records(tmp_path, columns)
    assert names(run_of(lambda row: {MISMATCH: 0.3}, records=(str(tmp_path),))) == [found]
