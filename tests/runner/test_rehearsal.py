"""A rehearsal of each shipped recipe: the same keys, small values, and a sentence for each change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.recipes import SHIPPED, small
from trustrl.errors import ConfigError
from trustrl.runner.plan import plan
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.rehearsal import PROMPT, rehearsed
from trustrl.runner.verl_command import command
from trustrl.world import tasks

HARDWARE = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.actor.use_dynamic_bsz",
    "reward.custom_reward_function.path", "reward.custom_reward_function.name",
}  # fmt: skip
"""Settings that the package for CPUs gives itself."""
LEFT_OUT = {
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
}  # fmt: skip
CUT = {
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.megatron.context_parallel_size",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path / "cache"))


def settings_of(recipe, folder):
    return {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in command(recipe, folder, "model")[3:]}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
@pytest.mark.parametrize("vllm", [True, False], ids=["vllm", "no-vllm"])
def test_a_shipped_recipe_is_rehearsed_with_the_same_keys(file, vllm, tmp_path):
    recipe = load(file)
    rehearsal, changes = rehearsed(recipe, vllm=vllm)
    assert plan(rehearsal, tmp_path).to_dict()["counts"]["sequences_sampled"] <= 64
    assert Recipe.from_dict(rehearsal.to_dict()) == rehearsal
    same = ("region", "advantage", "loss", "lora")
    assert all(getattr(rehearsal, table) == getattr(recipe, table) for table in same)
    assert rehearsal.optimiser.learning_rate == recipe.optimiser.learning_rate
    assert len(changes) == len(set(changes)) > 3
    if recipe.engine.name == "verl":
        full, tiny = settings_of(recipe, tmp_path), settings_of(rehearsal, tmp_path)
        replay = set() if vllm else {key for key in full if "replay" in key or key.endswith("val_kwargs.top_p")}
        assert full.keys() - tiny.keys() <= HARDWARE | LEFT_OUT | CUT | replay
        merged = {"actor_rollout_ref.model.lora.merge"} if recipe.lora else set()
        assert tiny.keys() <= full.keys() | merged | {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu"}
        assert [key for key in merged if not any(change.startswith(f"{key} is ") for change in changes)] == []


def test_problems_stand_in_for_a_set_on_the_hub_in_its_own_columns(tmp_path):
    recipe = load("troll-eurus")
    rehearsal, changes = rehearsed(recipe, vllm=False)
    (own,), (table,) = recipe.task.settings["data"], rehearsal.task.settings["data"]
    same = ("prompt", "answer", "where", "chat", "template", "use")
    assert {key: table.get(key) for key in same} == {key: own.get(key) for key in same}
    row = json.loads(Path(table["files"][0]).read_text().partition("\n")[0])
    assert (row["ability"], row["reward_model"].keys()) == ("math", {"ground_truth"})
    task = tasks.load("data", **rehearsal.task.settings)
    train, held_out = (task.rows(split, chat=True) for split in ("train", "held_out"))
    assert len(train) >= rehearsal.schedule.prompts_per_batch
    assert len(held_out) == 4
    assert {row["answer"] for row in train} == {"1", "2", "3"}
    assert max(len(row["prompt"][-1]["content"]) for row in train) < PROMPT - 100  # room for the chat's marks
    assert changes[0].startswith("NOT THE DATA of PRIME-RL/Eurus-2-RL-Data: ")


def test_every_benchmark_has_its_own_stand_in(tmp_path):
    rehearsal, _ = rehearsed(load("dppo-dense"), vllm=False)
    rows = tasks.load("data", **rehearsal.task.settings).rows("held_out", rehearsal.evaluation.count, chat=True)
    assert sorted(row["data_set"] for row in rows) == ["aime24"] * 4 + ["aime25"] * 4


def test_files_of_the_reader_are_read_and_their_prompts_are_counted_in_characters(tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": i}) + "\n" for i in range(40)))
    plain = small().to_dict()
    del plain["task"]
    data = {"files": str(tmp_path / "mine.jsonl"), "prompt": "q", "answer": "a"}
    more = {"reward": {"function": "exact"}, "model": {"name": "a/b", "architecture": "llama"}}
    recipe = Recipe.from_dict({**plain, "data": data, **more})
    rehearsal, changes = rehearsed(recipe, vllm=False)
    assert rehearsal.task == recipe.task
    assert not any("NOT THE DATA" in change for change in changes)
    assert rehearsal.schedule.max_prompt_tokens == 4 * recipe.schedule.max_prompt_tokens


def test_sizes_of_the_layout_become_two_as_far_as_four_processes_suffice():
    moe = rehearsed(load("dppo-moe"), vllm=True)[0]
    assert (moe.layout.tensor_parallel, moe.layout.expert_parallel, moe.engine.ranks) == (2, 2, 2)
    larger = rehearsed(load("qwen3-moe-megatron"), vllm=True)[0]
    assert (larger.layout.context_parallel, larger.layout.pipeline_parallel, larger.engine.ranks) == (2, 1, 4)
    assert larger.layout.router_replay == "R3"
    assert rehearsed(load("qwen3-moe-megatron"), vllm=False)[0].layout.router_replay == "disabled"


def test_a_model_of_unknown_architecture_is_refused():
    recipe = load("troll-grpo")
    with pytest.raises(ConfigError, match=r"model\.architecture must be one of qwen2, .* to rehearse other/model, got"):
        rehearsed(replace(recipe, model=replace(recipe.model, name="other/model", architecture=None)), vllm=False)


def test_the_architecture_of_a_model_in_a_folder_is_read_from_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "apertus"}')
    recipe = load("troll-grpo")
    model = replace(recipe.model, name=str(tmp_path), architecture=None)
    assert rehearsed(replace(recipe, model=model), vllm=False)[0].model.name == "stand-in-apertus"
