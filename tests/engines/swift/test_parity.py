"""ms-swift's own trainer against the file of tensors that every engine answers, and against its own clip."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("swift")

import torch
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import GRPOTrainer

import trustrl
from support import parity, swift_world as world
from trustrl import regions
from trustrl.engines.swift.trainer import TrustRegionGRPOTrainer

AVERAGES = {"grpo": parity.sequence_mean, "bnpo": parity.token_mean}


class FakeModel:
    """Two words whose probabilities make the first word's log-prob the given one."""

    def __init__(self, logp):
        self.logp = logp

    def __call__(self, **inputs):
        logp = self.logp.double()
        other = torch.log(-torch.expm1(logp))
        logits = torch.stack([logp, other], -1)
        return SimpleNamespace(logits=torch.cat([logits, torch.zeros_like(logits[:, :1])], 1))


@pytest.fixture(scope="module")
def trainer(given, module_choice):
    made = world.trainer_of(given)
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.fixture(scope="module")
def module_choice():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUSTRL_REGION", "dppo-binary-tv")
        patch.setenv("TRUSTRL_BEHAVIOR", "trainer")
        yield


def choose(trainer, region, loss_type):
    """Puts another region into the trainer."""
    trainer.region, trainer._needs, trainer.loss_type = region, region.needs(), loss_type
    trainer._settings = trainer._settings._replace(region=region, behavior="sampler")
    trainer._first_loss = False
    trainer._region_metrics._sums.clear()
    trainer._metrics["train"].clear()


def inputs_of(batch):
    """ms-swift's micro-batch."""
    ids = torch.zeros(batch.in_loss.shape, dtype=torch.long)
    rollout = GRPOBatch(
        completion_mask=batch.in_loss,
        truncated_mask=torch.zeros(len(ids), dtype=torch.bool),
        seq_lengths=batch.in_loss.sum(1),
        old_per_token_logps=batch.proximal_logp,
        rollout_per_token_logps=batch.behavior_logp,
        advantages=batch.advantage,
        num_items_in_batch=batch.in_loss.sum(),
        logits_to_keep=ids.shape[1],
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, rollout


def gradient_of(loss, batch):
    inputs, rollout = inputs_of(batch)
    value, _ = loss(FakeModel(batch.logp), inputs, rollout)
    (found,) = torch.autograd.grad(value, batch.logp)
    return found


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_preset_has_the_files_gradients_with_a_fake_model(trainer, name):
    region = trustrl.preset(name)
    for loss_type, average in AVERAGES.items():
        if name in parity.PER_SEQUENCE and loss_type != "grpo":
            continue
        choose(trainer, region, loss_type)
        parity.check(name, lambda batch: gradient_of(trainer._compute_loss_and_metrics, batch), average)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_ppo_is_ms_swifts_own_clip_with_a_fake_model(trainer, loss_type):
    region = regions.PPO(regions.Ratio(max_decrease=0.2, max_increase=0.2), anchor="proximal")
    choose(trainer, region, loss_type)
    batch = parity.read("ppo").batch
    batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
    stock = GRPOTrainer._compute_loss_and_metrics.__get__(trainer)
    wanted = gradient_of(stock, batch)
    found = gradient_of(trainer._compute_loss_and_metrics, batch)
    assert 0 < (wanted == 0)[batch.in_loss].double().mean() < 1
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-6


def test_the_region_is_added_to_ms_swifts_kl_with_a_fake_model(trainer, monkeypatch):
    region = regions.PPO(regions.Ratio(max_decrease=0.2, max_increase=0.2), anchor="proximal")
    choose(trainer, region, "grpo")
    batch = parity.read("ppo").batch
    batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
    monkeypatch.setattr(trainer, "beta", 0.3)

    def gradient(loss):
        inputs, rollout = inputs_of(batch)
        rollout.ref_per_token_logps = batch.behavior_logp
        value, metrics = loss(FakeModel(batch.logp), inputs, rollout)
        assert metrics["kl"] > 0
        return torch.autograd.grad(value, batch.logp)[0]

    wanted = gradient(GRPOTrainer._compute_loss_and_metrics.__get__(trainer))
    found = gradient(trainer._compute_loss_and_metrics)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 1e-6


def test_truncated_completions_leave_the_loss_with_overlong_filter_and_a_fake_model(trainer, monkeypatch):
    choose(trainer, trustrl.preset("pg-is"), "grpo")
    monkeypatch.setattr(trainer, "overlong_filter", True)
    batch = parity.read("pg-is").batch
    batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
    inputs, rollout = inputs_of(batch)
    rollout.truncated_mask[0] = True
    value, _ = trainer._compute_loss_and_metrics(FakeModel(batch.logp), inputs, rollout)
    (found,) = torch.autograd.grad(value, batch.logp)
    assert not found[0].any()
    assert found[1].any()


def test_the_adapter_overrides_three_methods_and_hides_no_other():
    ours = {name for cls in TrustRegionGRPOTrainer.__mro__[:2] for name in vars(cls) if not name.startswith("__")}
    shared = {name for name in ours if hasattr(GRPOTrainer, name)}
    assert shared == {"_compute_loss_and_metrics", "_get_per_token_logps_and_entropies", "_prepare_batch_inputs"}


def test_the_region_is_stored_in_checkpoints(trainer):
    from trustrl.engines.common.loss_seam import RegionState

    stored = [one.settings for one in trainer.callback_handler.callbacks if isinstance(one, RegionState)]
    assert json.loads(json.dumps(stored)) == [trustrl.config_to_dict(trustrl.preset("dppo-binary-tv"))]
