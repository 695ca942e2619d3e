"""Layouts of verl: what a recipe may choose, verl's own settings for it, and what is refused."""

import tomllib

import pytest

from support.recipes import small
from trustrl.errors import ConfigError
from trustrl.runner.layout import VERL_KEYS, Layout
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_command import command, layout_of

GPUS = ("engine.name=verl", "engine.device=cuda", "sampler.kind=vllm", "engine.nodes=2", "engine.ranks_per_node=8")
MEGATRON = (*GPUS, "layout.strategy=megatron", "model.dtype=bfloat16")
ACTOR = "actor_rollout_ref.actor"


def settings(*overrides, tmp_path):
    _, _, _, *found = command(small(*overrides), tmp_path, "model")
    return dict(one.split("=", 1) for one in found)


def test_megatron_gets_its_layout_in_verl_s_own_words(tmp_path):
    sizes = {
        "tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4,
        "expert_tensor_parallel": 1,
    }  # fmt: skip
    found = settings(
        *MEGATRON, *(f"layout.{name}={size}" for name, size in sizes.items()), "layout.router_replay=R3",
        "optimiser.schedule=cosine", "schedule.seed=7", tmp_path=tmp_path,
    )  # fmt: skip
    assert {name: int(found[VERL_KEYS[name]]) for name in sizes} == sizes
    assert found["model_engine"] == found[f"{ACTOR}.strategy"] == "megatron"
    assert found[f"{ACTOR}.megatron.router_replay.mode"] == "R3"
    assert found["actor_rollout_ref.rollout.enable_rollout_routing_replay"] == "True"
    assert found[f"{ACTOR}.megatron.dtype"] == "bfloat16"
    assert found[f"{ACTOR}.megatron.seed"] == "7"
    assert found[f"{ACTOR}.optim.lr_decay_style"] == "cosine"
    assert not [key for key in found if "fsdp" in key or "lr_scheduler_type" in key], "Megatron does not have these"


def test_r2_replays_the_trainer_s_own_experts(tmp_path):
    found = settings(*MEGATRON, "layout.router_replay=R2", tmp_path=tmp_path)
    assert found[f"{ACTOR}.megatron.router_replay.mode"] == "R2"
    assert "actor_rollout_ref.rollout.enable_rollout_routing_replay" not in found


def test_ulysses_gets_packed_sequences_which_verl_requires(tmp_path):
    found = settings(*GPUS, "layout.strategy=fsdp2", "layout.ulysses_parallel=4", tmp_path=tmp_path)
    assert found[f"{ACTOR}.strategy"] == "fsdp2"
    assert found[f"{ACTOR}.ulysses_sequence_parallel_size"] == "4"
    assert found["actor_rollout_ref.model.use_remove_padding"] == "True"
    assert "model_engine" not in found


def test_without_a_layout_verl_gets_none(tmp_path):
    found = settings(*GPUS, tmp_path=tmp_path)
    assert not set(found) & {"model_engine", "actor_rollout_ref.model.use_remove_padding", *VERL_KEYS.values()}
    assert not [key for key in found if "megatron" in key]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param([*GPUS, "layout.tensor_paralel=2"], "Did you mean 'tensor_parallel'", id="an unknown key"),
        pytest.param([*GPUS, "layout.strategy=zero3"], "layout.strategy must be one of 'fsdp'", id="an unknown engine"),
        pytest.param([*MEGATRON, "layout.tensor_parallel=0"], "must be a whole number ≥ 1", id="a size of 0"),
        pytest.param([*MEGATRON, "layout.sequence_parallel=1"], "must be true or false", id="a flag that is a number"),
        pytest.param([*MEGATRON, "layout.router_replay=R4"], "must be one of 'disabled', 'R2', 'R3'", id="R4"),
        pytest.param(
            [*MEGATRON, "layout.tensor_parallel=3"],
            "tensor_parallel × pipeline_parallel × context_parallel must divide the 16 ranks, got 3",
            id="3 of 16 ranks",
        ),
        pytest.param(
            [*MEGATRON, "layout.tensor_parallel=4", "layout.pipeline_parallel=2", "layout.context_parallel=4"],
            "must divide the 16 ranks, got 32", id="more ranks than there are",
        ),
        pytest.param(
            [*MEGATRON, "layout.tensor_parallel=4", "layout.pipeline_parallel=2", "layout.expert_parallel=4"],
            "must divide the 16 ranks, got 32. expert_tensor_parallel is tensor_parallel by default",
            id="experts that are split as well",
        ),
        pytest.param([*GPUS, "layout.ulysses_parallel=3"], "ulysses_parallel must divide the 16 ranks", id="Ulysses"),
        pytest.param(
            [*GPUS, "layout.expert_parallel=8"], "expert_parallel must be left out without Megatron, got 8", id="FSDP experts"
        ),
        pytest.param(
            [*GPUS, "layout.strategy=fsdp2", "layout.router_replay=R3"], "left out without Megatron", id="FSDP replay"
        ),
        pytest.param(
            [*MEGATRON, "layout.ulysses_parallel=2"], "must be 1 with Megatron, got 2. Set layout.context_parallel",
            id="Ulysses with Megatron",
        ),
        pytest.param(
            [*MEGATRON, "layout.tensor_parallel=2", "layout.expert_parallel=2", "layout.sequence_parallel=false"],
            "sequence_parallel must be true with expert_parallel", id="experts without sequence parallelism",
        ),
        pytest.param([*MEGATRON, "model.dtype=float32"], "must be 'bfloat16' or 'float16' for Megatron", id="float32"),
        pytest.param(["layout.strategy=fsdp2"], r"\[layout\] must be left out on TRL, got strategy", id="TRL"),
        pytest.param(
            [*MEGATRON, "layout.tensor_parallel=2", "schedule.prompts_per_step=3", "schedule.completions_per_prompt=2"],
            "multiple of the 8 replicas of the model, got 6", id="a batch that replicas cannot share",
        ),
    ],
)  # fmt: skip
def test_a_layout_that_verl_cannot_have_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        small(*overrides)


def test_replicas_share_a_step_where_ranks_could_not():
    sequences = ("schedule.prompts_per_step=1", "schedule.completions_per_prompt=4")
    with pytest.raises(ConfigError, match="multiple of the 16 ranks, got 4"):
        small(*GPUS, *sequences)
    recipe = small(*MEGATRON, *sequences, "layout.tensor_parallel=4", "engine.micro_batch=1")
    assert recipe.layout.replicas(16) == 4
    with pytest.raises(ConfigError, match="share of a step, 1 sequences, got 2"):
        small(*MEGATRON, *sequences, "layout.tensor_parallel=4", "engine.micro_batch=2")


def test_a_layout_survives_dictionaries_and_toml():
    recipe = small(*MEGATRON, "layout.tensor_parallel=4", "layout.router_replay=R2")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        pytest.param(["model_engine=megatron"], Layout(strategy="megatron"), id="verl's group"),
        pytest.param([f"{ACTOR}.strategy=fsdp2"], Layout(strategy="fsdp2"), id="verl's strategy"),
        pytest.param(
            ["model_engine=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
            Layout(strategy="megatron", tensor_parallel=4), id="a size",
        ),
        pytest.param([f"{ACTOR}.ulysses_sequence_parallel_size=2"], Layout(ulysses_parallel=2), id="Ulysses"),
        pytest.param(
            [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], Layout(ulysses_parallel=2), id="its newer name"
        ),
        pytest.param(["model_engine=torchtitan"], Layout(), id="an engine without a layout here"),
    ],
)  # fmt: skip
def test_settings_of_the_engine_change_the_layout_that_is_planned(given, layout):
    assert layout_of(small(*GPUS, *(f"engine.settings.{one}" for one in given))) == layout


def test_settings_of_the_engine_win_over_the_layout(tmp_path):
    setting = f"{ACTOR}.megatron.tensor_model_parallel_size"
    overrides = (*MEGATRON, "layout.tensor_parallel=4", f"engine.settings.{setting}=2")
    assert layout_of(small(*overrides)).tensor_parallel == 2
    assert settings(*overrides, tmp_path=tmp_path)[setting] == "2"
