"""reasoning-gym behind the same interface, held against its own verifier."""

import json
from itertools import islice

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym", reason='needs "trustrl[tasks]"')

import trustrl
from trustrl.world import tasks
from trustrl.world.tasks.reasoning import decoded, encoded

# Chosen for what their verifiers look at: numbers, texts, metadata, tuples, fractions, no stored answer.
NAMES = [
    "chain_sum", "leg_counting", "spell_backward", "basic_arithmetic", "countdown", "mini_sudoku", "rearc",
    "graph_color", "propositional_logic", "word_sorting", "n_queens", "knights_knaves", "prime_factorization",
    "gsm_symbolic",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_the_verifiers_own(name):
    """Right answers, other problems' answers and rubbish, from rows that went through JSON."""
    task = tasks.load(f"reasoning-gym:{name}")
    rows = json.loads(json.dumps(task.rows("train", 4)))
    oracle = reasoning_gym.create_dataset(name, size=1, seed=0)
    entries = list(islice((e for e in task.problems(0) if not task.is_held_out(e)), 4))
    assert [e["question"] for e in entries] == [row["prompt"] for row in rows]
    found = set()
    for row, entry in zip(rows, entries, strict=True):
        for answer in (*(e["answer"] for e in entries), "7", "", "[[1, 2], [3]]", "hello"):
            try:
                expected = oracle.score_answer(answer or "", entry)
            except Exception:
                expected = 0.0
            assert task.score(answer or "", row) == expected, answer
            assert task.score(f"Let me see.\n<answer>{answer or ''}</answer>", row) == expected, answer
            found.add(expected)
    if entries[0]["answer"] is not None:
        assert {1.0} < found  # both right and wrong answers were compared


@pytest.mark.parametrize("name", NAMES)
def test_entries_survive_the_dataset_exactly(name):
    for entry in islice(tasks.load(f"reasoning-gym:{name}").problems(0), 20):
        assert decoded(encoded(entry)) == entry  # which tells a tuple from a list and the key 1 from "1"


def test_an_answer_the_verifier_cannot_read_is_worth_nothing():
    task = tasks.load("reasoning-gym:prime_factorization")
    entry = next(task.problems(0))
    with pytest.raises(ValueError, match="invalid literal"):  # its own verifier would end a training run
        reasoning_gym.create_dataset("prime_factorization", size=1, seed=0).score_answer("hello", entry)
    assert task.score("hello", task.row(entry, chat=False)) == 0.0


def test_the_split_shares_no_question():
    task = tasks.load("reasoning-gym:chain_sum", max_terms=2, max_digits=1)  # so few that draws repeat them
    train = {row["prompt"] for seed in range(3) for row in task.rows("train", 1000, seed)}
    held_out = {row["prompt"] for seed in range(3) for row in task.rows("held_out", 100, seed)}
    assert len(train) < 3000
    assert not train & held_out


def test_neighbouring_seeds_share_no_more_than_chance():
    """In reasoning-gym itself, seeds 0 and 1 share all problems but one."""
    task = tasks.load("reasoning-gym:chain_sum", min_digits=4, max_digits=4, min_terms=4, max_terms=4)
    first, second = ({row["prompt"] for row in task.rows("train", 200, seed)} for seed in (0, 1))
    assert not first & second
    assert task.rows("train", 5, 0) == task.rows("train", 5, 0)


def test_settings_reach_the_problems():
    rows = tasks.load("reasoning-gym:chain_sum", min_terms=5, max_terms=5).rows("train", 20)
    assert {decoded(row["entry"])["metadata"]["num_terms"] for row in rows} == {5}


def test_the_reward_reads_the_entry_column():
    task = tasks.load("reasoning-gym:chain_sum")
    rows = task.rows("train", 2, chat=True)
    assert "<answer>" in rows[0]["prompt"][0]["content"]
    said = [[{"role": "assistant", "content": f"<answer>{row['answer']}</answer>"}] for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("answer", "entry")}
    prompts = [row["prompt"] for row in rows]
    assert task.reward(prompts=prompts, completions=said, completion_ids=[[1], [2]], **columns) == [1.0, 1.0]
    assert max(task.reward(prompts=prompts, completions=said[::-1], completion_ids=[[1], [2]], **columns)) < 1.0


@pytest.mark.parametrize(
    ("name", "settings", "error", "says"),
    [
        pytest.param(
            "chain_summ", {}, trustrl.errors.UnknownNameError, "Did you mean 'chain_sum'?", id="unknown dataset"
        ),
        pytest.param(
            "", {}, trustrl.errors.UnknownNameError, "Write for example 'reasoning-gym:chain_sum'", id="none named"
        ),
        pytest.param(
            "chain_sum", {"min_term": 2}, trustrl.errors.ConfigError, "Did you mean 'min_terms'?", id="a setting"
        ),
        pytest.param(
            "chain_sum", {"size": 10}, trustrl.errors.ConfigError, "no setting 'size'", id="a setting that is ours"
        ),
        pytest.param("chain_sum", {"min_terms": -1}, trustrl.errors.ConfigError, "got {'min_terms': -1}", id="a value"),
        pytest.param("chain_sum", {"held_out": 2}, trustrl.errors.ConfigError, "share in (0, 1), got 2", id="a share"),
    ],
)
def test_what_it_does_not_have_is_refused_in_a_sentence(name, settings, error, says):
    with pytest.raises(error) as caught:
        tasks.load(f"reasoning-gym:{name}", **settings)
    assert says in str(caught.value)


def test_all_problems_of_an_endless_task_are_refused():
    with pytest.raises(trustrl.errors.ConfigError, match="count must be a whole number"):
        tasks.load("reasoning-gym:chain_sum").rows("train")
