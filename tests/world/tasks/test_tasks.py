"""Tasks by name, the split they share, and Arithmetic: plain Python, so this runs without any framework."""

import json
import subprocess
import sys

import pytest

import trustrl
from trustrl.errors import MissingPackageError
from trustrl.world import tasks
from trustrl.world.tasks import Arithmetic, Task

CHAT = [{"role": "user", "content": "What is 7 + 45? Answer with the number only."}]


def keys(rows):
    """What a model can carry from one problem to another: the two numbers, in any order."""
    return {tuple(sorted(row["prompt"].rstrip("=").split("+"))) for row in rows}


def test_importing_tasks_and_models_imports_no_framework():
    code = """
import sys, trustrl.world.tasks, trustrl.world.models
trustrl.world.tasks.load("arithmetic").rows("train", 5)
sys.exit(", ".join({"torch", "transformers", "datasets", "reasoning_gym", "numpy"} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- names ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("arithmetik", "Did you mean 'arithmetic'?", id="a typing mistake"),
        pytest.param("reasoning-gim:chain_sum", "Did you mean 'reasoning-gym'?", id="a mistake before the colon"),
        pytest.param("chess", "Known: arithmetic, data, reasoning-gym.", id="nothing near"),
    ],
)
def test_unknown_tasks_are_refused_with_the_nearest(name, says):
    with pytest.raises(trustrl.errors.UnknownNameError, match="Unknown task") as caught:
        tasks.load(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        pytest.param("arithmetic", {"digit": 3}, "Did you mean 'digits'?", id="unknown setting"),
        pytest.param("arithmetic:chain_sum", {}, "Leave out ':chain_sum'", id="a variant it does not have"),
        pytest.param("arithmetic", {"digits": 0}, "whole number ≥ 1, got 0", id="no digits"),
        pytest.param("arithmetic", {"held_out": 1.0}, "share in (0, 1), got 1.0", id="everything held out"),
        pytest.param("arithmetic", {"held_out": 0}, "share in (0, 1), got 0", id="nothing held out"),
        pytest.param("arithmetic", {"seed": -1}, "whole number ≥ 0, got -1", id="negative seed"),
    ],
)
def test_settings_are_refused_in_a_sentence(name, settings, says):
    with pytest.raises(trustrl.errors.ConfigError) as caught:
        tasks.load(name, **settings)
    assert says in str(caught.value)


def test_a_third_party_task_joins_by_registering():
    """Four methods make a task, and the split, the rows and the reward come with them."""

    class Echo(Task):
        held_out, seed = 0.5, 0

        def problems(self, seed):
            yield from range(seed, seed + 100)

        def text(self, problem):
            return str(problem)

        def row(self, problem, chat):
            return {"prompt": str(problem), "answer": str(problem)}

        def score(self, completion, row):
            return float(completion == row["answer"])

    assert {r["answer"] for r in Echo().rows("train")} | {r["answer"] for r in Echo().rows("held_out")} == {
        str(i) for i in range(100)
    }
    assert Echo().reward(prompts=["1", "2"], completions=["1", "1"], answer=["1", "2"]) == [1.0, 0.0]
    tasks.TASKS.register("echo")(Echo)
    try:
        assert isinstance(tasks.load("echo"), Echo)
    finally:
        tasks.TASKS._entries.pop("echo")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym")

    monkeypatch.setattr("trustrl.optional_imports.import_module", missing)
    with pytest.raises(MissingPackageError, match=r'pip install "trustrl\[tasks\]"') as caught:
        tasks.load("reasoning-gym:chain_sum")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, trustrl.errors.TrustRLError)


def test_a_package_that_is_there_but_broken_keeps_its_own_error(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'sympy'", name="sympy")

    monkeypatch.setattr("trustrl.optional_imports.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="sympy") as caught:
        tasks.load("reasoning-gym:chain_sum")
    assert not isinstance(caught.value, MissingPackageError)


# --- the split ---


def test_the_split_covers_all_problems_and_shares_none():
    task = Arithmetic()
    train, held_out = task.rows("train"), task.rows("held_out")
    assert len(train) + len(held_out) == 100 * 100
    assert not keys(train) & keys(held_out)  # not even with the numbers swapped
    assert len(held_out) == pytest.approx(1000, abs=100)


def test_the_split_is_the_same_everywhere():
    """Frozen: another split would make every stored accuracy on held-out problems mean something else."""
    rows = Arithmetic().rows("held_out", 3)
    assert [row["prompt"] for row in rows] == ["58+66=", "24+07=", "12+08="]


def test_draws_do_not_move_the_split():
    task = Arithmetic()
    held_out = keys(task.rows("held_out"))
    for seed in range(3):
        assert keys(task.rows("held_out", 200, seed)) <= held_out
        assert not keys(task.rows("train", 200, seed)) & held_out


def test_the_seeds_do_what_they_say():
    task = Arithmetic()
    assert task.rows("train", 20, seed=3) == task.rows("train", 20, seed=3)
    assert task.rows("train", 20, seed=3) != task.rows("train", 20, seed=4)
    assert keys(Arithmetic(seed=1).rows("held_out")) != keys(task.rows("held_out"))


def test_rows_do_not_repeat():
    rows = Arithmetic(digits=3).rows("train", 5000)
    assert len({row["prompt"] for row in rows}) == 5000


def test_numbers_too_many_to_list_are_drawn():
    rows = Arithmetic(digits=9).rows("held_out", 50)
    assert all(len(row["prompt"]) == 9 + 1 + 9 + 1 and len(row["answer"]) == 10 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(("test",), "one of 'train', 'held_out', got 'test'", id="unknown split"),
        pytest.param(("train", 0), "whole number ≥ 1, got 0", id="none"),
        pytest.param(("held_out", 5000), "must be at most 977", id="more than there are"),
    ],
)
def test_rows_that_cannot_be_had_are_refused(arguments, says):
    with pytest.raises(trustrl.errors.ConfigError) as caught:
        Arithmetic().rows(*arguments)
    assert says in str(caught.value)


# --- Arithmetic ---


def test_the_answers_are_right_and_padded():
    for row in Arithmetic().rows("train", 500):
        a, b = row["prompt"].rstrip("=").split("+")
        assert len(a) == len(b) == 2
        assert row["answer"] == str(int(a) + int(b)).zfill(3)


def test_chat_rows_ask_the_same_problems():
    task = Arithmetic()
    for plain, chat in zip(task.rows("train", 50), task.rows("train", 50, chat=True), strict=True):
        a, b = map(int, plain["prompt"].rstrip("=").split("+"))
        assert f"{a} + {b}?" in chat["prompt"][-1]["content"]
        assert chat["answer"] == plain["answer"]
    assert json.loads(json.dumps(chat)) == chat


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param("052", 1.0, id="exact"),
        pytest.param(" 052\n", 1.0, id="white space around it"),
        pytest.param("52", 0.0, id="a zero missing"),
        pytest.param("0520", 0.0, id="a digit too many"),
        pytest.param("053", 0.0, id="another number"),
        pytest.param("= 052", 0.0, id="words around it"),
        pytest.param("", 0.0, id="nothing"),
    ],
)
def test_plain_answers_must_be_exact(completion, expected):
    assert Arithmetic().score(completion, {"prompt": "07+45=", "answer": "052"}) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        pytest.param("52", "052", 1.0, id="no leading zero"),
        pytest.param("7 + 45 = 52.", "052", 1.0, id="the last number counts"),
        pytest.param("It is 52, not 7.", "052", 0.0, id="only the last number"),
        pytest.param("52.0", "052", 1.0, id="as a decimal"),
        pytest.param("52.5", "052", 0.0, id="half too much"),
        pytest.param("-52", "052", 0.0, id="negative"),
        pytest.param("45-52", "052", 1.0, id="a dash between numbers is no sign"),
        pytest.param("1,998", "1998", 1.0, id="thousands"),
        pytest.param("1,998", "0998", 0.0, id="thousands are not dropped"),
        pytest.param("first 1, then 998", "0998", 1.0, id="a comma in a sentence"),
        pytest.param("I cannot add.", "052", 0.0, id="no number"),
        pytest.param("9" * 5000, "052", 0.0, id="a number too long for int"),
    ],
)
def test_chat_answers_are_compared_as_numbers(completion, answer, expected):
    assert Arithmetic(digits=3).score(completion, {"prompt": CHAT, "answer": answer}) == expected


# --- the reward, called as TRL calls it ---


def test_the_reward_of_texts():
    rewards = Arithmetic().reward(
        prompts=["07+45=", "07+45=", "10+10="],
        completions=["052", "020", "020"],
        completion_ids=[[1], [2], [3]],
        answer=["052", "052", "020"],
        trainer_state=object(),
        log_metric=print,
    )
    assert rewards == [1.0, 0.0, 1.0]


def test_the_reward_of_chats():
    rewards = Arithmetic().reward(
        prompts=[CHAT] * 4,
        completions=[
            [{"role": "assistant", "content": "That makes 52."}],
            [{"role": "assistant", "content": "52"}, {"role": "assistant", "content": "No, 53."}],
            [{"role": "assistant", "content": None}],
            [],
        ],
        completion_ids=[[1]] * 4,
        answer=["052"] * 4,
    )
    assert rewards == [1.0, 0.0, 0.0, 0.0]


def test_the_rewards_name_is_what_trainers_log():
    assert Arithmetic().reward.__name__ == "reward"


def test_a_dataset_without_answers_is_refused():
    with pytest.raises(trustrl.errors.MissingDataError, match="the column 'answer', got completion_ids, solution"):
        Arithmetic().reward(prompts=["07+45="], completions=["052"], completion_ids=[[1]], solution=["052"])


def test_numbers_may_have_more_digits_than_a_machine_word():
    rows = tasks.load("arithmetic", digits=20).rows("train", 50)
    assert len({row["prompt"] for row in rows}) == 50
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 20
        assert row["answer"] == f"{int(a) + int(b):021d}"
