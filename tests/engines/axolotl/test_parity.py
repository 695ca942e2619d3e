"""The shared file of tensors through axolotl's own trainer class, and PPO against the clip that the trainer brings."""

import pytest

pytest.importorskip("axolotl")

import torch
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

import trustrl
from support import axolotl_world as world, parity
from trustrl import regions
from trustrl.engines.axolotl import TrustRegionTrainer


def trainer(folder, region, **more):
    return world.trainer(
        TrustRegionTrainer, folder, region=region, behavior="trainer", startup_checks=False, **more
    )  # fmt: skip


def anchors(batch):
    return {
        "trustrl_version": torch.full(batch.logp.shape, -1), "trustrl_behavior_logp": batch.behavior_logp,
        "trustrl_proximal_logp": batch.proximal_logp,
    }  # fmt: skip


@pytest.mark.parametrize("name", parity.PRESETS)
def test_each_preset_has_the_oracles_gradient_and_verdicts_in_axolotls_trainer(name, tmp_path):
    per_sequence = name in parity.PER_SEQUENCE
    ours = trainer(tmp_path, trustrl.preset(name), loss_type="grpo" if per_sequence else "dapo")
    weights = parity.sequence_mean if per_sequence else parity.token_mean
    parity.check(name, lambda batch: world.gradient(ours, batch, inputs=anchors(batch)), weights)


def test_ppo_has_the_gradient_of_axolotls_own_clip(tmp_path):
    batch = parity.read("ppo").batch
    batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
    region = regions.PPO(regions.Ratio(max_increase=0.2, max_decrease=0.2))
    ours = world.gradient(trainer(tmp_path, region), batch, inputs=anchors(batch))
    stock = world.trainer(AxolotlGRPOTrainer, tmp_path)
    theirs = world.gradient(stock, batch, inputs={"old_per_token_logps": batch.behavior_logp})
    decided = batch.in_loss & (batch.advantage != 0)
    assert 0 < (theirs[decided] == 0).sum() < decided.sum()
    assert torch.equal(theirs == 0, ours == 0)
    assert (ours - theirs).abs().max() / theirs.abs().max() <= parity.LARGEST_ERROR
