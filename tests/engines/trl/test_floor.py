"""Regions on the sampled token in every TRL we support: TRL's own gradients, and a training run with all checks.

Run at the oldest TRL, at one in the middle and at the newest. Before 1.9, TRL's `clip_ratio/low_min` and `high_max` are
over ranks instead of sequences, so that metrics are compared only at the newest, in test_parity.py.
"""

import pytest

pytest.importorskip("trl")

import torch

import trustrl
from support import trl_world as world
from support.trl_parity import CLASSIC, CLIP, LARGEST_ERROR, Case, adapted, compared, stops_and_keeps
from trustrl import regions
from trustrl.engines.common import seam
from trustrl.engines.refusals.trl import LUSPO_WITHOUT_PADDING

AVERAGES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


@pytest.mark.parametrize("loss_type", AVERAGES)
@pytest.mark.parametrize(("accumulated", "per_generation"), [(1, 1), (2, 4)])
def test_every_average_is_that_of_the_installed_trl(loss_type, accumulated, per_generation):
    """Loss and gradient, in training and in evaluation; releases scale `dapo` differently, and ours with them."""
    if loss_type == "luspo" and seam.version_of("trl") < LUSPO_WITHOUT_PADDING:
        with pytest.raises(trustrl.errors.ConfigError, match=r"averages over padding.*trl>=1.10"):
            world.ours(CLIP, loss_type=loss_type)
        return
    both = {
        "loss_type": loss_type, "gradient_accumulation_steps": accumulated, "steps_per_generation": per_generation,
    }  # fmt: skip
    case = Case(CLIP, both=both, batch={"steps_per_generation": per_generation, "tools": True})
    for mode in ("train", "eval"):
        found, wanted = compared(case, mode)
        assert stops_and_keeps(found.metrics)
        assert found.loss == pytest.approx(wanted.loss, rel=LARGEST_ERROR, abs=1e-7)
        assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


TERMS = {
    "kl": {"both": {"beta": 0.1}},
    "kl corrected for the sampler": {"both": {"beta": 0.1, "use_bias_correction_kl": True}},
    "advantages per token": {"batch": {"advantages_per_token": True}},
    "temperature": {"both": {"temperature": 0.7}, "batch": {"temperature": 0.7}},
    "a truncated completion": {"batch": {"truncated_row": True}, "both": {"beta": 0.1}},
}


@pytest.mark.parametrize("name", TERMS)
def test_the_other_terms_are_those_of_the_installed_trl(name):
    found, wanted = compared(Case(regions.PPO(CLASSIC), **TERMS[name]))
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


def test_adapters_get_the_gradient_of_the_installed_trl():
    mine, theirs = adapted(regions.PPO(CLASSIC)), adapted(None)
    inputs = world.batch(theirs.model)
    found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
    assert all("lora" in name for name in wanted.gradient)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


def test_the_samplers_mismatch_is_corrected_once_by_the_installed_trl():
    inputs = world.batch(world.tiny_model())
    mine, theirs = world.ours(regions.PPO(CLASSIC, anchor="proximal")), world.stock()
    for trainer in (mine, theirs):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


def test_a_run_trains_with_every_check_and_its_first_ratio_is_one():
    trainer = world.ours(
        regions.DPPO(regions.BinaryTV(max_increase=0.01, max_decrease=0.01)), given={"startup_checks": True},
        max_steps=4, num_iterations=4, learning_rate=1e-2, logging_steps=1,
    )  # fmt: skip
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "trustrl/tokens" in entry]
    assert steps[0]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert max(step["trustrl/masked_share"] for step in steps) > 0.02
    assert all(step["trustrl/loss_weight"] == pytest.approx(1, abs=1e-5) for step in steps)
    assert not torch.equal(before, trainer.model.lm_head.weight)
