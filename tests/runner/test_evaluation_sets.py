"""Benchmarks of an evaluation: their settings, the unbiased estimate of pass@k, and curves that never collide."""

import json
from itertools import combinations
from statistics import fmean

import pytest

from support.recipes import SMALL
from trustrl.errors import ConfigError
from trustrl.runner.directory import RunDirectory
from trustrl.runner.evaluation_sets import Accuracies, pass_at, passed_on_verl, problems_of
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_command import command
from trustrl.world import tasks
from trustrl.world.verl_dataset import benchmark_row, reward, verl_row

AVERAGED, GREEDY = {"data": "one", "answers": 4, "pass_at": [2]}, {"data": "two", "temperature": 0.0, "pass_at": []}


@pytest.fixture
def recipe(tmp_path):
    """Returns a function that makes a recipe with two sets of equal problems, and evaluates these blocks."""
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)]
    for name, rows in (("train", lines[3:]), ("one", lines[:3]), ("two", lines[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    data = [{"files": str(tmp_path / "train.jsonl"), "use": "train"}] + [
        {"files": str(tmp_path / f"{name}.jsonl"), "use": "held_out"} for name in ("one", "two")
    ]
    plain = {name: table for name, table in SMALL.items() if name != "task"}

    def make(*blocks, **more):
        shared = {"answers": 2, "temperature": 0.5, "pass_at": [1]}
        return Recipe.from_dict({
            **plain, "data": data, "reward": {"function": "exact"}, "engine": {"name": "verl"},
            "evaluation": {**shared, "sets": list(blocks), **more},
        })  # fmt: skip

    return make


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_estimate_is_the_share_of_choices_with_a_right_answer(n):
    for right in range(n + 1):
        answers = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            exact = fmean(any(chosen) for chosen in combinations(answers, k))
            assert pass_at(k, right, n) == pytest.approx(exact, abs=1e-12)


def test_a_block_has_the_shared_settings_that_it_leaves_out(recipe):
    first, second = recipe(AVERAGED, GREEDY).evaluation.blocks()
    assert (first.name, first.answers, first.temperature, first.pass_at) == ("one", 4, 0.5, (2,))
    assert (second.name, second.answers, second.temperature, second.pass_at) == ("two", 2, 0.0, ())


def test_blocks_survive_a_recipe_file(recipe):
    whole = recipe(AVERAGED, GREEDY)
    assert Recipe.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (
            {"data": "three"},
            r"evaluation\.sets\.data must name a set of \[data\], got 'three'\. The recipe has: train,",
        ),
        ({"data": "two", "name": "one"}, r"evaluation\.sets must have different names, got one, one\."),
        ({"data": "two", "pass_at": [3]}, r"evaluation\.sets\.pass_at must be at most answers, 2, got 3\."),
        ({"data": "two", "top_p": 1.5}, r"evaluation\.sets\.top_p must be a share in \(0, 1\]"),
        ({"data": "two", "n": 3}, r"\[evaluation\.sets\] has no setting 'n'"),
        ({"answers": 3}, r"evaluation\.sets must have data"),
    ],
)
def test_a_block_that_cannot_be_evaluated_is_refused(recipe, block, says):
    with pytest.raises(ConfigError, match=says):
        recipe(AVERAGED, block)


def test_pass_at_without_blocks_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"evaluation\.pass_at must be left out without \[\[evaluation\.sets\]\]"):
        recipe()


def test_equal_problems_of_two_sets_are_two_curves(recipe, tmp_path):
    chosen = recipe(
        {**AVERAGED, "name": "sampled"}, {**GREEDY, "count": 2}, {**AVERAGED, "data": "two", "name": "again"}
    )
    task, accuracies = tasks.load("data", **chosen.task.settings), Accuracies()
    for number, (block, problems) in enumerate(problems_of(chosen, task)):
        for row in problems:
            accuracies.add(row["data_set"], [float(number == i) for i in range(block.answers)], block.pass_at)
    directory = RunDirectory(tmp_path)
    directory.append_evaluation(3, accuracies.means(), accuracies.passed())
    (row,) = directory.rows("evaluation")
    assert row == {
        "step": 3, "accuracy": pytest.approx((3 * 0.25 + 2 * 0.5 + 3 * 0.25) / 8), "count": 8,
        "accuracy/sampled": 0.25, "accuracy/two": 0.5, "accuracy/again": 0.25,
        "pass@2/sampled": 0.5, "pass@2/again": 0.5,
    }  # fmt: skip


def test_verl_gets_the_settings_of_each_set_and_its_answers_give_pass_at_k(recipe, tmp_path):
    chosen = recipe(AVERAGED, GREEDY)
    assert f"trainer.validation_data_dir={tmp_path / 'answers'}" in command(chosen, tmp_path, "model")
    task, lines = tasks.load("data", **chosen.task.settings), []
    for block, problems in problems_of(chosen, task):
        for index, row in enumerate(problems):
            plain = verl_row(row, index, "data", "held_out", chosen.task.settings)
            assert "__rollout_n__" not in plain
            benchmark = benchmark_row(plain, block.answers, block.temperature, block.top_p)
            assert benchmark["__rollout_n__"] == block.answers
            assert benchmark["extra_info"]["sampling"] == {"temperature": block.temperature, "top_p": 1.0}
            for number in range(block.answers):
                answer = row["answer"] if number == index else "no"
                said = reward(benchmark["data_source"], answer, row["answer"], benchmark["extra_info"])
                assert said == {
                    "score": float(number == index),
                    "acc": said["score"],
                    "problem": f"{block.data}#{index}",
                }
                lines.append(json.dumps(said))
            assert reward(plain["data_source"], row["answer"], row["answer"], plain["extra_info"]) == 1.0
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    assert passed_on_verl(tmp_path / "1.jsonl", chosen, len(lines)) == {"pass@2/one": 0.5}
    assert not (tmp_path / "1.jsonl").exists()


def test_without_pass_at_verl_writes_no_answers(recipe, tmp_path):
    settings = command(recipe({**AVERAGED, "pass_at": []}), tmp_path, "model")
    assert not any("validation_data_dir" in setting for setting in settings)
