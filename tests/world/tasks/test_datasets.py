"""Rows as a `datasets.Dataset`, and back into the reward."""

import pytest

pytest.importorskip("datasets", reason='needs "trustrl[tasks]"')

from trustrl.world import tasks


@pytest.mark.parametrize("chat", [False, True], ids=["texts", "chats"])
@pytest.mark.parametrize("name", ["arithmetic", "reasoning-gym:chain_sum", "reasoning-gym:graph_color"])
def test_a_dataset_holds_the_rows(name, chat):
    if name.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    task = tasks.load(name)
    dataset = task.dataset("held_out", 5, seed=2, chat=chat)
    assert dataset.to_list() == task.rows("held_out", 5, seed=2, chat=chat)


def test_a_column_of_a_dataset_is_enough_for_the_reward():
    task = tasks.load("arithmetic")
    data = task.dataset("train", 20)
    given = {"completion_ids": [[0]] * 20, **{name: list(data[name]) for name in data.column_names if name != "prompt"}}
    assert task.reward(prompts=list(data["prompt"]), completions=list(data["answer"]), **given) == [1.0] * 20
