"""What the verl engine refuses of verl's configuration, always with the setting and what to do."""

import copy
import functools
import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")

import hydra
import yaml
from omegaconf import OmegaConf

import trustrl
from trustrl import ConfigError
from trustrl.engines.verl import check_settings

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = f"{POLICY_LOSS}._target_=trustrl.engines.verl.RegionLossConfig"
RIGHT = [f"{POLICY_LOSS}.loss_mode=trustrl-dppo-binary-tv", "algorithm.rollout_correction.bypass_mode=True"]
PROXIMAL = [OURS, f"{POLICY_LOSS}.loss_mode=trustrl-ppo", f"+{POLICY_LOSS}.region.anchor=proximal"]


@functools.cache
def defaults():
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


def configuration(*overrides):
    """verl's own defaults, changed as on its command line: a key it does not have needs a plus."""
    config = copy.deepcopy(defaults())
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key.removeprefix("+"), yaml.safe_load(value), force_add=key.startswith("+"))
    return config


@pytest.mark.parametrize("plain", [False, True], ids=["OmegaConf", "a dictionary"])
def test_two_settings_are_all_that_a_region_needs(plain):
    config = configuration(*RIGHT)
    assert check_settings(OmegaConf.to_container(config) if plain else config) == trustrl.preset("dppo-binary-tv")


def test_a_region_anchored_on_the_trainer_keeps_verls_correction():
    config = configuration(*PROXIMAL, "algorithm.rollout_correction.rollout_is=token")
    assert check_settings(config).anchor == "proximal"


def test_gspo_takes_its_own_average():
    mode = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", f"{POLICY_LOSS}.loss_mode=trustrl-gspo"]
    assert check_settings(configuration(*RIGHT, *mode)) == trustrl.preset("gspo")


ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"

# name: (overrides, what the message must say)
REFUSED = {
    "verl's own loss": ([f"{POLICY_LOSS}.loss_mode=vanilla"], ["loss_mode must be a region's name", "'vanilla'"]),
    "the old trainer": ([*RIGHT, "trainer.use_v1=False"], ["trainer.use_v1 must be True", "replaces loss_mode"]),
    "the recomputed policy as the sampler": (RIGHT[:1], [f"{CORRECTION}.bypass_mode must be True", "anchor=proximal"]),
    "the sampler as the recomputed policy": (
        [*PROXIMAL, *RIGHT[1:]], [f"{CORRECTION}.bypass_mode must be False", "anchor=behavior"]
    ),
    "no recorded log-probs": (
        [*RIGHT, f"{ROLLOUT}.calculate_log_probs=False"], [f"{ROLLOUT}.calculate_log_probs must be True"]
    ),
    "a mismatch counted twice": (
        [*RIGHT, f"{CORRECTION}.rollout_is=token"], [f"{CORRECTION}.rollout_is must be null", "'token'", "π'/μ"]
    ),
    "rejection that nobody applies": (
        [*RIGHT, f"{CORRECTION}.rollout_rs=token_k1"], [f"{CORRECTION}.rollout_rs must be null", "nothing would be rejected"]
    ),
    "raw log-probs": (
        [*RIGHT, f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.7"],
        [f"{ROLLOUT}.logprobs_mode must be processed_logprobs", "0.7"],
    ),
    "top-p": ([*RIGHT, f"{ROLLOUT}.top_p=0.95"], [f"{ROLLOUT}.top_p must be 1.0", "0.95", "renormalised"]),
    "top-p and a proximal anchor": ([*PROXIMAL, f"{ROLLOUT}.top_p=0.95"], [f"{ROLLOUT}.top_p must be 1.0"]),
    "top-k": ([*RIGHT, f"{ROLLOUT}.top_k=50"], [f"{ROLLOUT}.top_k must be -1", "50", "renormalised"]),
    "a repetition penalty": ([*RIGHT, f"+{ROLLOUT}.repetition_penalty=1.1"], [f"{ROLLOUT}.repetition_penalty must be 1.0"]),
    "a bound of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio=0.15"], [f"{ACTOR}.clip_ratio must be left at 0.2", "region"]),
    "an upper bound of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio_high=0.28"], [f"{ACTOR}.clip_ratio_high must be left"]),
    "a cap of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio_c=20"], [f"{ACTOR}.clip_ratio_c must be left at 3.0"]),
    "a gate of verl's": ([*RIGHT, f"{ACTOR}.tau_neg=2.0"], [f"{ACTOR}.tau_neg must be left at 1.05"]),
    "gspo averaged over tokens": (
        [*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-gspo"], [f"{ACTOR}.loss_agg_mode must be seq-mean-token-mean", "token-mean"]
    ),
    "top-k divergences": ([*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-dppo-topk-tv"], ["20 most probable words"]),
    "a projection": ([*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-troll"], ["64 most probable words", "projection"]),
    "two anchors": ([*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-minirl"], ["one anchor", "behavior and proximal"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_a_region_is_refused_in_a_sentence(name):
    overrides, says = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        check_settings(configuration(*overrides))
    for part in says:
        assert part in str(refused.value)
    assert str(refused.value).endswith(".")


# ── the launcher: verl's main_ppo, after these checks ───────────────────────────────────────────────────────────────


def test_the_launcher_refuses_before_anything_starts(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "trustrl.engines.verl", f"hydra.run.dir={tmp_path}", RIGHT[0]],
        env=dict(os.environ), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1
    assert f"{CORRECTION}.bypass_mode must be True" in run.stderr
    assert "ray init" not in run.stdout


def test_the_launcher_starts_verl_with_its_own_configuration(monkeypatch):
    from verl.trainer import main_ppo

    from trustrl.engines.verl import __main__ as launcher

    started = []
    monkeypatch.setenv(launcher.VARIABLE, "their.module")
    monkeypatch.setattr(main_ppo, "main", started.append)
    config = configuration(*RIGHT)
    launcher.main(config)
    (given,) = started
    assert os.environ[launcher.VARIABLE] == "their.module,trustrl.engines.verl"
    assert given.ray_kwargs.ray_init.runtime_env.env_vars[launcher.VARIABLE] == os.environ[launcher.VARIABLE]
    assert given.actor_rollout_ref == configuration(*RIGHT).actor_rollout_ref
    launcher.main(config)
    assert os.environ[launcher.VARIABLE] == "their.module,trustrl.engines.verl"
