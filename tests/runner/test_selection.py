"""Selection of problems that a model solves sometimes: the rule, shards, resumption, and the files that [data] reads."""

import json
from collections import Counter

import pytest

from support.recipes import SMALL
from trustrl.errors import ConfigError
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.selection import Selection, select
from trustrl.world import tasks

N = 10


@pytest.fixture
def recipe(tmp_path):
    rows = [{"id": i, "q": {"text": f"What is {i}?"}, "a": str(i), "level": "x"} for i in range(12)]
    rows.append(rows[3])  # twice in the data
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.from_dict(with_file(tmp_path / "data.jsonl"))


def with_file(file):
    plain = {name: table for name, table in SMALL.items() if name != "task"}
    data = {"files": str(file), "prompt": "q.text", "answer": "a", "where": {"level": ["x"]}}
    return {**plain, "data": data, "reward": {"function": "exact"}}


class Sampler:
    """Solves the problem i in i of ten answers, and ten of ten from i = 10 on."""

    def __init__(self, dies_after=99):
        self.asked, self.dies_after = Counter(), dies_after

    def __call__(self, rows, seed):
        if len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.asked.update(row["prompt"] for row in rows)
        return [[row["answer"]] * min(int(row["answer"]), N) + ["no"] * max(N - int(row["answer"]), 0) for row in rows]


RULE = {"answers": N, "batch": 2}


def ids(folder):
    return [json.loads(line)["id"] for line in (folder / "selected.jsonl").read_text().splitlines()]


def test_problems_with_two_to_eight_right_answers_of_ten_are_kept(recipe, tmp_path):
    sampler = Sampler()
    result = select(recipe, tmp_path / "out", Selection(**RULE), sampler)
    assert ids(tmp_path / "out") == list(range(2, 9))
    file = str(tmp_path / "out/selected.jsonl")
    assert result == {"problems": 12, "counted": 12, "selected": 7, "files": [file]}
    assert set(sampler.asked.values()) == {1}


def test_the_selection_is_data_for_the_same_recipe(recipe, tmp_path):
    select(recipe, tmp_path / "out", Selection(**RULE), Sampler())
    chosen = Recipe.from_dict(with_file(tmp_path / "out/selected.jsonl"))
    problems = tasks.load("data", **chosen.task.settings).sources()
    assert [problem.answer for problem, _ in problems] == [str(i) for i in range(2, 9)]


def test_a_killed_process_continues_where_it_ended(recipe, tmp_path):
    first, second = Sampler(dies_after=6), Sampler()
    with pytest.raises(KeyboardInterrupt):
        select(recipe, tmp_path / "out", Selection(**RULE), first)
    (file,) = (tmp_path / "out").glob("counts-*")
    assert len(file.read_text().splitlines()) == 6
    with file.open("a") as counts:
        counts.write('{"problem": "half a li')
    assert select(recipe, tmp_path / "out", Selection(**RULE), second)["counted"] == 12
    assert first.asked.keys() & second.asked.keys() == set()
    assert len(first.asked.keys() | second.asked.keys()) == 12
    assert ids(tmp_path / "out") == list(range(2, 9))


def test_shards_answer_different_problems_and_the_last_one_writes_the_selection(recipe, tmp_path):
    samplers = []
    for number in (2, 3, 1):
        assert not (tmp_path / "out/selected.jsonl").exists()
        samplers.append(Sampler())
        result = select(recipe, tmp_path / "out", Selection(**RULE, shard=(number, 3)), samplers[-1])
    assert [len(sampler.asked) for sampler in samplers] == [4, 4, 4]
    assert result["files"]
    assert ids(tmp_path / "out") == list(range(2, 9))


def test_other_bounds_need_no_new_answers(recipe, tmp_path):
    select(recipe, tmp_path / "out", Selection(**RULE), Sampler())
    result = select(recipe, tmp_path / "out", Selection(**RULE, lowest=0.0, highest=0.1), Sampler(dies_after=0))
    assert (ids(tmp_path / "out"), result["selected"]) == ([0, 1], 2)


def test_counts_of_other_settings_are_refused(recipe, tmp_path):
    select(recipe, tmp_path / "out", Selection(**RULE), Sampler())
    with pytest.raises(ConfigError, match=r"must be made with the same settings, got a change of answers\."):
        select(recipe, tmp_path / "out", Selection(answers=4), Sampler())


def test_a_second_process_of_a_shard_is_refused(recipe, tmp_path):
    def again(rows, seed):
        with pytest.raises(ConfigError, match="A shard must have one process"):
            select(recipe, tmp_path / "out", Selection(**RULE), Sampler())
        return Sampler()(rows, seed)

    assert select(recipe, tmp_path / "out", Selection(**RULE), again)["counted"] == 12


def test_a_recipe_without_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must have \[data\] and \[reward\] to select problems, got 'arithmetic'"):
        select(Recipe.from_dict(SMALL), tmp_path, Selection())


@pytest.mark.parametrize(("more", "says"), [
    ({"shard": (3, 2)}, "--shard must be i/n with i from 1 to n, got 3/2"),
    ({"lowest": 0.9}, "must be shares in order, got 0.9 and 0.8"), ({"answers": 0}, "--answers must be"),
])  # fmt: skip
def test_a_rule_that_selects_nothing_is_refused(more, says):
    with pytest.raises(ConfigError, match=says):
        Selection(**more)


def test_the_selection_replaces_a_recipes_source_on_the_command_line():
    recipe = load("dppo-sanity", ["data.files=selected.jsonl"])
    (table,) = recipe.task.settings["data"]
    assert "hub" not in table
    assert "subset" not in table
    assert table["answer"] == "solution"
