"""Every preset trains in TRL's own loop, and each stops, damps or projects something that plain policy gradient does not.

Measured on the same micro-batch: the gradient of the region's loss by the output layer beside that of `pg-is`. Every
fourth step is on fresh samples, where all of them agree.
"""

import math
from typing import NamedTuple

import pytest

pytest.importorskip("trl")

import torch

import trustrl
from support import trl_world as world
from trustrl import regions
from trustrl.engines.trl import trainer as engine

STEPS, UPDATES_PER_ROLLOUT = 20, 4
SETTINGS = {
    "max_steps": STEPS, "num_iterations": UPDATES_PER_ROLLOUT, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "logging_steps": 1,
}  # fmt: skip
ACTING = {"dppo-minimal": {"max_decrease": 0.1}}
"""Settings of presets that stop nothing at their defaults here."""

NEVER_ACTS = {"pg-is": "it is what the others are compared with"}
"""Presets whose gradient is plain policy gradient's throughout, and why."""

SAME_AS_PPO = {
    "tis": "its cap on π'/μ",
    "mis": "its bounds on π'/μ",
    "icepop": "its bounds on π'/μ",
    "tis-product": "its cap on the product of π'/μ",
    "mis-product": "its bound on the product of π'/μ",
    "divergence-gate": "its gate on π' and μ",
    "minirl": "its weight π'/μ",
}
"""Here the trainer is the sampler, π' = μ, and what these add to PPO's mask is 1. A sampler of its own is another test."""


class Run(NamedTuple):
    """What 20 steps of one preset gave."""

    differences: list[float]
    """By step: |g − g'| / |g'|, g' of pg-is."""

    history: list[dict]
    weights: dict[str, torch.Tensor]


def run_of(name):
    region = trustrl.preset(name, **ACTING.get(name, {}))
    average = {"loss_type": "grpo"} if region.needs().reduction else {}
    trainer = world.ours(region, given={"startup_checks": True}, **SETTINGS | average)
    before, differences, original = trainer.model.lm_head.weight.detach().clone(), [], engine.policy_loss

    def both(policy, rollout, region, **kwargs):
        out = original(policy, rollout, region, **kwargs)
        recorded = "proximal" if rollout.behavior_logp is None else "behavior"  # the trainer's own, either way
        plain = original(policy, rollout, regions.PolicyGradient(anchor=recorded), **kwargs)
        head = trainer.model.lm_head.weight
        g, g_plain = (torch.autograd.grad(x.loss, head, retain_graph=True)[0] for x in (out, plain))
        differences.append(((g - g_plain).norm() / g_plain.norm()).item())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "policy_loss", both)
        trainer.train()
    assert not torch.equal(before, trainer.model.lm_head.weight)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(differences, history, {key: p.detach() for key, p in trainer.model.named_parameters()})


def test_completions_without_a_reward_are_counted():
    """TRL leaves them out of the batch; their share is logged."""
    trainer = world.ours(trustrl.preset("dppo-binary-tv"), **SETTINGS | {"max_steps": 2, "num_iterations": 1})
    (reward,) = trainer.reward_funcs
    trainer.reward_funcs[0] = lambda *args, **kwargs: [None, float("nan"), *reward(*args, **kwargs)[2:]]
    trainer.train()
    logged = [entry["frac_reward_nan"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [2 / 8, 2 / 8]


@pytest.fixture(scope="module")
def runs():
    """Each preset trains once, when it is first asked for."""

    class Runs(dict):
        def __missing__(self, name):
            self[name] = run_of(name)
            return self[name]

    return Runs()


def grouped(names):
    """The tests of one preset go to one worker, which trains it once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(f"preset {name}")) for name in names]


@pytest.mark.parametrize("name", grouped(trustrl.presets()))
def test_every_preset_trains_with_finite_losses_gradients_and_weights(runs, name):
    run = runs[name]
    assert [entry["step"] for entry in run.history] == list(range(1, STEPS + 1))
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in run.history)
    assert all(entry["trustrl/dropped_share"] == 0 for entry in run.history)
    assert all(x.isfinite().all() for x in run.weights.values())


@pytest.mark.parametrize("name", grouped(trustrl.presets()))
def test_on_fresh_samples_every_preset_is_plain_policy_gradient(runs, name):
    fresh = runs[name].differences[::UPDATES_PER_ROLLOUT]
    assert len(fresh) == STEPS // UPDATES_PER_ROLLOUT
    assert max(fresh) < 1e-3


@pytest.mark.parametrize("name", grouped(trustrl.presets()))
def test_every_preset_acts_on_later_updates(runs, name):
    most = max(runs[name].differences)
    if name in NEVER_ACTS:
        assert most == 0, f"{name} acts now: {NEVER_ACTS[name]}"
    else:
        assert most > 0.05, f"{name} differs from pg-is by at most {most:.2g}: give it settings at which it acts"


@pytest.mark.parametrize("name", grouped(SAME_AS_PPO))
def test_a_correction_for_the_sampler_does_nothing_where_the_trainer_samples(runs, name):
    difference = world.error(runs[name].weights, runs["ppo"].weights)
    assert difference < 1e-6, f"{SAME_AS_PPO[name]} changed something"
