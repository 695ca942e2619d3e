"""A recipe's command line is one that verl's own configuration takes: composed by hydra, nothing started."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from trustrl.engines.verl.verl_config import recording_of, region_of
from trustrl.runner.layout import VERL_KEYS
from trustrl.runner.recipe import load
from trustrl.runner.verl_command import command, hydra, quoted
from trustrl_verl_cpu.cpu_defaults import with_defaults

ROOT = Path(__file__).parents[3]
PAPERS = ("dppo-", "troll-")
"""The papers' experiments, which `test_paper_recipes.py` composes."""

RECIPES = [
    file for file in sorted((ROOT / "recipes").glob("*.toml"))
    if load(file).engine.name == "verl" and not file.stem.startswith(PAPERS)
]  # fmt: skip
IN_FULL = ["region.preset=dppo-topk-tv", "region.divergence.max_increase=0.2", "region.anchor=proximal"]


def composed(file, overrides, folder):
    recipe = load(file, overrides)
    _, _, module, *settings = command(recipe, folder, recipe.model.name)
    if module == "trustrl_verl_cpu":
        settings = with_defaults(settings)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return recipe, compose("ppo_trainer", overrides=settings)


@pytest.mark.parametrize("overrides", [[], IN_FULL], ids=["as it is", "a region in full"])
@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_verl_composes_the_command_of_every_recipe(file, overrides, tmp_path):
    recipe, config = composed(file, overrides, tmp_path)
    actor = config.actor_rollout_ref.actor
    assert actor.ppo_mini_batch_size == recipe.schedule.prompts_per_step
    assert config.data.train_batch_size == recipe.schedule.prompts_per_batch
    assert actor.optim.lr == recipe.optimiser.learning_rate
    if overrides:
        assert actor.policy_loss.loss_mode == "trustrl"
        assert actor.policy_loss.region.divergence.max_increase == 0.2
        assert actor.policy_loss.region.anchor == "proximal"
    else:
        assert actor.policy_loss.loss_mode.startswith("trustrl-")


@pytest.mark.parametrize(
    "text",
    ["/runs/plain-1.0_b", "/runs/Jörg", "/runs/Jörg Müller", "/runs/日本", "/runs/a#1;b&c!", "~/a|b<c>", 'a "quoted" x',
     "it's", "a\\b c", "ends with \\", 'a\\\\"b', "two\nlines, a\ttab", "{a: 1}", "k=v"],
)  # fmt: skip
def test_hydra_reads_a_text_as_it_was(text):
    parser = OverridesParser.create()
    assert parser.parse_override(f"key={hydra(text)}").value() == text
    assert parser.parse_override(f"key={quoted(text)}").value() == text
    assert parser.parse_override(f"key={hydra([text, {'a': text}])}").value() == [text, {"a": text}]


def test_a_folder_with_any_name_reaches_verl(tmp_path):
    folder = tmp_path / "Jörg's run #1"
    _, config = composed(ROOT / "recipes/verl-tour.toml", [], folder)
    assert config.trainer.default_local_dir == str(folder / "checkpoints")
    assert config.data.train_files == str(folder / "train.parquet")


def test_verl_reads_the_recipe_s_records(tmp_path):
    triggers = '[{kind="quantile-above", of="divergence", level=0.3}, {kind="entropy-slope", max_fall=0.05}]'
    overrides = [f"records.triggers={triggers}", "records.sample=0.5"]
    recipe, config = composed(ROOT / "recipes/verl-tour.toml", overrides, tmp_path)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert recording_of(policy_loss) == recipe.recording(tmp_path)
    assert recording_of(omega_conf_to_dataclass(policy_loss)) == recipe.recording(tmp_path)
    assert region_of(policy_loss.loss_mode, policy_loss) == recipe.region


def test_verl_reads_the_layout_of_megatron(tmp_path):
    recipe, config = composed(ROOT / "recipes/qwen3-moe-megatron.toml", [], tmp_path)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    engine = actor.engine
    assert type(actor).__name__ == "McoreActorConfig"
    assert actor.strategy == config.actor_rollout_ref.ref.strategy == "megatron"
    assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == (4, 2)
    assert (engine.context_parallel_size, engine.sequence_parallel) == (2, True)
    assert (engine.expert_model_parallel_size, engine.expert_tensor_parallel_size) == (8, 1)
    assert engine.router_replay.mode == "R3"
    assert engine.dtype == recipe.model.dtype
    assert actor.optim.lr_decay_style == recipe.optimiser.schedule
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 4


def test_verl_reads_the_layout_of_ulysses(tmp_path):
    overrides = ["layout.ulysses_parallel=4", "region.preset=dppo-binary-tv"]
    _, config = composed(ROOT / "recipes/qwen3-8gpu.toml", overrides, tmp_path)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.strategy, actor.engine.ulysses_sequence_parallel_size) == ("fsdp2", 4)
    assert config.actor_rollout_ref.model.use_remove_padding


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_verl_has_every_setting_of_a_layout(engine):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    keys = [key for name, key in VERL_KEYS.items() if (name == "ulysses_parallel") == (engine == "dp")]
    missing = object()
    assert [key for key in keys if OmegaConf.select(config, key, default=missing) is missing] == []


def test_a_setting_that_verl_does_not_have_is_refused_by_verl(tmp_path):
    with pytest.raises(HydraException, match="no_such_thing"):
        composed(ROOT / "recipes/verl-tour.toml", ["engine.settings.trainer.no_such_thing=1"], tmp_path)
