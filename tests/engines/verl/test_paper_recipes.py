"""Recipes of the papers' experiments: verl composes them to the values of the papers, the authors' files and verl's example."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from trustrl.engines.verl.verl_config import region_of
from trustrl.runner.recipe import load, load_arms
from trustrl.runner.recipe_files import shipped
from trustrl.runner.rehearsal import rehearsed
from trustrl.runner.verl_command import command
from trustrl_verl_cpu.cpu_defaults import with_defaults

ROOT = Path(__file__).parents[3]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TV, KL = {"kind": "binary-tv", "max_increase": 0.2, "max_decrease": 0.2}, {"kind": "binary-kl", "max_increase": 0.05}
EVALUATED = {
    f"{R}.val_kwargs.temperature": 0.7, f"{R}.val_kwargs.top_p": 0.95, f"{R}.val_kwargs.n": 32,
    f"{R}.val_kwargs.do_sample": True,
}  # fmt: skip
MOE = {
    "data.train_batch_size": 256, f"{A}.ppo_mini_batch_size": 32, f"{R}.n": 16, "data.max_response_length": 16_384,
    f"{A}.optim.lr": 1e-6, f"{A}.strategy": "megatron", **EVALUATED,
}  # fmt: skip
DENSE = {
    "data.train_batch_size": 128, f"{A}.ppo_mini_batch_size": 32, f"{R}.n": 8, "data.max_response_length": 8000,
    f"{A}.optim.lr": 1e-6, **EVALUATED,
}  # fmt: skip
DPPO = {f"{R}.temperature": 1.0, "algorithm.norm_adv_by_std_in_grpo": False, "algorithm.adv_estimator": "grpo"}
EXAMPLE = {
    "data.max_prompt_length": 2048, "data.max_response_length": 8192, f"{A}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{A}.loss_scale_factor": 8192, f"{A}.entropy_coeff": 0, f"{A}.use_kl_loss": False,
    f"{A}.megatron.tensor_model_parallel_size": 2, f"{A}.megatron.expert_model_parallel_size": 8,
    f"{A}.megatron.expert_tensor_parallel_size": 1, f"{R}.tensor_model_parallel_size": 4,
    f"{A}.megatron.override_transformer_config.moe_router_dtype": "fp32",
    f"{A}.megatron.override_transformer_config.recompute_granularity": "full",
}  # fmt: skip
TROLL = {
    "trainer.n_gpus_per_node": 4, "trainer.nnodes": 1, f"{A}.optim.lr": 1e-6, f"{A}.optim.weight_decay": 0.0,
    f"{A}.optim.clip_grad": 1.0, f"{A}.optim.lr_scheduler_type": "constant", f"{A}.optim.lr_warmup_steps": 0,
    "data.train_batch_size": 256, f"{A}.ppo_mini_batch_size": 32, f"{A}.ppo_epochs": 1, f"{R}.n": 8,
    "trainer.total_training_steps": 1001, "trainer.test_freq": 10, f"{R}.val_kwargs.do_sample": False,
    f"{R}.val_kwargs.n": 1, f"{A}.use_kl_loss": False, "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.model.lora_rank": 0,
}  # fmt: skip
DAPO = {"data.max_prompt_length": 2048, "data.max_response_length": 4096}
EXPERIMENTS = {
    "dppo-moe": {**DPPO, **MOE},
    "dppo-moe-r3": {**DPPO, **MOE, f"{A}.megatron.router_replay.mode": "R3"},
    "dppo-moe-thinking": {**DPPO, **MOE},
    "dppo-moe-verl": {**DPPO, **MOE, **EXAMPLE},
    "dppo-dense": {**DPPO, **DENSE},
    "dppo-lora": {
        **DPPO, **DENSE, f"{A}.ppo_mini_batch_size": 16, f"{A}.optim.lr": 1e-5,
        "actor_rollout_ref.model.lora_rank": 32, "actor_rollout_ref.model.lora_alpha": 64,
    },
    "dppo-sanity": {**DPPO, "data.train_batch_size": 64, f"{A}.ppo_mini_batch_size": 16, f"{R}.n": 8},
    "troll-grpo": {**TROLL, **DAPO, f"{A}.loss_agg_mode": "token-mean", "algorithm.norm_adv_by_std_in_grpo": True},
    "troll-dr-grpo": {
        **TROLL, **DAPO, f"{A}.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.norm_adv_by_std_in_grpo": False,
    },
    "troll-gspo": {**TROLL, **DAPO, f"{A}.loss_agg_mode": "seq-mean-token-mean"},
    "troll-ppo": {**TROLL, **DAPO, "algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-5},
    "troll-gsm8k": {**TROLL, "data.max_prompt_length": 512, "data.max_response_length": 2048},
    "troll-eurus": {**TROLL, **DAPO},
}  # fmt: skip
REGIONS = {
    **{name: {"max_ratio": 5.0, **TV} for name in ("dppo-moe", "dppo-moe-r3", "dppo-moe-thinking", "dppo-dense")},
    "dppo-moe-verl": {"max_ratio": None, **TV, "max_increase": 0.15, "max_decrease": 0.15},
    "dppo-lora": {"max_ratio": 5.0, **TV, "max_increase": 0.15, "max_decrease": 0.15},
    "dppo-sanity": {"max_ratio": None, **TV, "max_increase": 0.15, "max_decrease": 0.15},
    **{
        name: {"bound": 0.05, "alpha": 1.0, "k": 64, "tail_mass": 1e-5, "rest": "published", "level": "token"}
        for name in EXPERIMENTS if name.startswith("troll")
    },
    "troll-gspo": {"bound": 0.05, "alpha": 1.0, "k": 64, "tail_mass": 1e-5, "rest": "published", "level": "sequence"},
}  # fmt: skip
SCALING = {
    "dppo-tv": {"max_ratio": 5.0, **TV}, "dppo-kl": {"max_ratio": 5.0, **KL, "max_decrease": 0.05},
    "dppo-topk-tv": {"max_ratio": 5.0, "kind": "topk-tv", "k": 20, "max_increase": 0.2, "max_decrease": 0.2},
    "dppo-topk-kl": {"max_ratio": 5.0, "kind": "topk-kl", "k": 20, "max_increase": 0.05, "max_decrease": 0.05},
    "ppo": {"kind": "ratio", "max_increase": 0.27, "max_decrease": 0.2}, "cispo": {"max_ratio": 5.0},
}  # fmt: skip
SANITY = {
    "dppo-tv": {"max_ratio": None, **TV, "max_increase": 0.15, "max_decrease": 0.15},
    "dppo-kl": {"max_ratio": None, **KL, "max_decrease": 0.05}, "cispo": {"max_ratio": 3.0},
    "ppo": {"kind": "ratio", "max_increase": 0.28, "max_decrease": 0.2},
    "dppo-kl-proximal": {"anchor": "proximal", "correction": None, **KL},
    "dppo-kl-decoupled": {"anchor": "proximal", **KL},
    "dppo-minimal": {"max_increase": float("inf"), "max_decrease": 0.5},
    "ppo-relax-both": {"relax_below": 0.1, "relax_side": "both"},
    "ppo-relax-high": {"relax_below": 0.1, "relax_side": "increase", "max_increase": 0.28},
    "ppo-relax-low": {"relax_below": 0.1, "relax_side": "decrease", "max_decrease": 0.2},
}  # fmt: skip
ABLATIONS = {
    "troll": {"bound": 0.05, "k": 64, "tail_mass": 1e-5}, "troll-bound-001": {"bound": 0.01, "k": 64},
    "troll-bound-025": {"bound": 0.25, "k": 64}, "troll-256": {"k": 256, "tail_mass": 1e-6, "bound": 0.05},
    "troll-16": {"k": 16, "tail_mass": 1e-4, "bound": 0.05},
    "clip": {"dual_clip": 10.0, "anchor": "proximal", "max_increase": 0.2, "max_decrease": 0.2},
}  # fmt: skip


def composed(settings):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=settings)


def has(region, values):
    """The values are those of the region, or of its divergence or ratio."""
    inner = getattr(region, "divergence", None) or getattr(region, "ratio", None)
    for name, value in values.items():
        owner = region if name not in ("kind", "max_increase", "max_decrease") and hasattr(region, name) else inner
        assert getattr(owner, name) == value, name
    return True


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_verl_composes_the_experiment(name, tmp_path):
    recipe = load(name)
    config = composed(command(recipe, tmp_path, recipe.model.name)[3:])
    values = {key: OmegaConf.select(config, key) for key in EXPERIMENTS[name]}
    assert values == EXPERIMENTS[name]
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert region_of(policy_loss.loss_mode, policy_loss) == recipe.region
    assert has(recipe.region, REGIONS[name])


@pytest.mark.parametrize("vllm", [True, False], ids=["vllm", "no-vllm"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_verl_composes_the_rehearsal_with_the_same_algorithm(name, vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    whole = load(name)
    rehearsal, _ = rehearsed(whole, vllm=vllm)
    config = composed(with_defaults(command(rehearsal, tmp_path, "model")[3:]))
    large = composed(command(whole, tmp_path, "model")[3:])
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert region_of(policy_loss.loss_mode, policy_loss) == whole.region
    for key in SAME:
        assert OmegaConf.select(config, key) == OmegaConf.select(large, key), key
    assert config.trainer.device == "cpu"


SAME = (
    "algorithm", f"{A}.strategy", f"{A}.loss_agg_mode", f"{A}.optim.lr", f"{A}.optim.weight_decay", f"{A}.use_kl_loss",
    f"{A}.entropy_coeff", f"{R}.temperature", "critic.optim.lr", "actor_rollout_ref.model.lora_rank",
    f"{A}.megatron.override_transformer_config.moe_router_dtype", f"{A}.megatron.expert_tensor_parallel_size",
)  # fmt: skip
"""What the paper's runs and their rehearsals have in common in verl's whole configuration."""


@pytest.mark.parametrize(("file", "arms"), [
    ("dppo-scaling", SCALING), ("dppo-sanity", SANITY), ("troll", ABLATIONS),
])  # fmt: skip
def test_the_arms_are_those_of_the_papers(file, arms):
    regions = load_arms(ROOT / f"recipes/arms/{file}.toml")
    assert arms.keys() <= regions.keys()
    for name, values in arms.items():
        assert has(regions[name], values), name


def test_the_decoupled_arm_weighs_by_the_ratio_to_the_sampler():
    correction = load_arms(ROOT / "recipes/arms/dppo-sanity.toml")["dppo-kl-decoupled"].correction
    assert type(correction).__name__ == "TIS"
    assert correction.max_ratio == float("inf")


def test_no_shipped_recipe_needs_settings_of_an_engine():
    assert [name for name, file in shipped().items() if load(file).engine.settings] == []
