"""Regions in OpenRLHF's own actor trainer: the parity file, OpenRLHF's own losses, and what it logs."""

import pytest

pytest.importorskip("openrlhf")

import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ray import ppo_actor

import trustrl
from support import openrlhf_world as world, parity
from trustrl.engines import openrlhf as engine
from trustrl.engines.openrlhf import losses
from trustrl.errors import ConfigError, EngineError, MissingDataError

LARGEST_ERROR = 1e-6
OLD = {"anchor": "proximal"}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    engine.install()
    monkeypatch.setenv("TRUSTRL_REGION", "dppo-binary-tv")


def mode_of(name):
    return "seq-mean-token-mean" if name in parity.PER_SEQUENCE else "token-mean"


def step(batch, args, recorded=True):
    """The gradient and the status of one `training_step`."""
    trainer = world.trainer(args, batch.logp)
    status = trainer.training_step(world.experience(batch, recorded), kl_ctl=0.0, step=0)
    return batch.logp.grad, status


def batch_of(name):
    batch = parity.read(name).batch
    return batch._replace(logp=batch.logp.clone().requires_grad_(True))


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_preset_in_openrlhfs_training_step_on_a_stub_network_has_the_parity_files_gradients(name, monkeypatch):
    monkeypatch.setenv("TRUSTRL_REGION", name)
    args = world.arguments(*world.RECORDED, "--actor.loss_agg_mode", mode_of(name))
    average = parity.sequence_mean if name in parity.PER_SEQUENCE else parity.token_mean
    parity.check(name, lambda batch: step(batch, args)[0], average)


@pytest.mark.parametrize(
    ("theirs", "preset", "region"),
    [
        ({"clip_eps_low": 0.2, "clip_eps_high": 0.28}, "ppo", OLD),
        (
            {"clip_eps_low": 0.1, "clip_eps_high": 0.2, "dual_clip": 1.4},
            "ppo",
            OLD | {"ratio": {"max_decrease": 0.1, "max_increase": 0.2}, "dual_clip": 1.4},
        ),
        (
            {"clip_eps_low": 0.003, "clip_eps_high": 0.004, "policy_loss_type": "gspo"},
            "gspo",
            OLD | {"ratio": {"max_decrease": 0.003, "max_increase": 0.004}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "token", "is_correction_mode": "clip",
             "is_correction_threshold": (0.0, 1.05)},
            "tis",
            {"correction": {"kind": "tis", "max_ratio": 1.05}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "token", "is_correction_threshold": (0.95, 1.05)},
            "mis",
            {"correction": {"kind": "mis", "min_ratio": 0.95, "max_ratio": 1.05}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "seq", "is_correction_gating": "binary_kl",
             "is_correction_threshold": (0.0, 5e-4)},
            "divergence-gate",
            {"correction": {"kind": "divergence-gate", "divergence": {"kind": "binary-kl", "max_increase": 5e-4}}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "seq", "is_correction_gating": "tv",
             "is_correction_threshold": (0.0, 0.011)},
            "divergence-gate",
            {"correction": {"kind": "divergence-gate", "divergence": {"kind": "binary-tv", "max_increase": 0.011}}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "token", "is_correction_gating": "binary_kl",
             "is_correction_threshold": (0.0, 5e-4)},
            "divergence-gate",
            {"correction": {"kind": "divergence-gate", "level": "token",
                            "divergence": {"kind": "binary-kl", "max_increase": 5e-4}}},
        ),
        (
            {"clip_eps_high": 0.28, "is_correction_level": "token", "is_correction_gating": "tv",
             "is_correction_threshold": (0.0, 0.011)},
            "divergence-gate",
            {"correction": {"kind": "divergence-gate", "level": "token",
                            "divergence": {"kind": "binary-tv", "max_increase": 0.011}}},
        ),
    ],
    ids=["ppo", "dual-clip", "gspo", "tis", "token-mask", "gate-kl", "gate-tv", "token-gate-kl", "token-gate-tv"],
)  # fmt: skip
@pytest.mark.parametrize(
    "counts",
    [{}, {"dp_size": 2, "batch_num_tokens": 97.0, "global_batch_size": 11.0}],
    ids=["micro-batch", "two-ranks"],
)
def test_a_region_is_openrlhfs_own_loss(theirs, preset, region, counts):
    batch = batch_of(preset)
    found_logp, wanted_logp = (batch.logp.detach().clone().requires_grad_(True) for _ in range(2))
    rest = (batch.proximal_logp, batch.advantage, batch.in_loss.float(), batch.behavior_logp)
    ours = engine.RegionLoss(trustrl.preset(preset, **region), mode_of(preset))
    found, wanted = ours(found_logp, *rest, **counts), PolicyLoss(**theirs)(wanted_logp, *rest, **counts)
    found[0].backward()
    wanted[0].backward()
    error = (found_logp.grad - wanted_logp.grad).abs().max() / wanted_logp.grad.abs().max()
    assert error <= LARGEST_ERROR
    torch.testing.assert_close(found[2], wanted[2])  # ppo_kl
    if wanted[3] is not None:
        torch.testing.assert_close(found[3], wanted[3])  # vllm_kl
    if preset == "divergence-gate":  # some are gated, some are not
        gated = (found_logp.grad == 0)[batch.in_loss & (batch.advantage != 0)]
        assert gated.any()
        assert not gated.all()
    if preset == "mis":
        torch.testing.assert_close(found[4], wanted[4])
        assert found[4] > 0.05
    if preset == "ppo" and "dual_clip" not in theirs:
        with_gradient = (batch.advantage != 0) & batch.in_loss
        ratio = (batch.logp - batch.proximal_logp).exp()
        clipped = torch.where(batch.advantage > 0, ratio > 1.28, ratio < 0.8) & with_gradient
        torch.testing.assert_close(found[1], clipped.sum() / batch.in_loss.sum())
        assert found[1] > 0.05


def test_micro_batches_add_up_to_the_step():
    batch, region = parity.read("dppo-binary-tv").batch, trustrl.preset("dppo-binary-tv")

    def gradient(rows, loss):
        logp = batch.logp[rows].clone().requires_grad_(True)
        mask = batch.in_loss[rows].long()
        counts = {"batch_num_tokens": float(batch.in_loss.sum()), "global_batch_size": float(len(batch.logp))}
        rest = (batch.proximal_logp[rows], batch.advantage[rows], mask, batch.behavior_logp[rows])
        loss(logp, *rest, **counts)[0].backward()
        return logp.grad

    for mode in ("token-mean", "seq-mean-token-mean"):
        loss = engine.RegionLoss(region, mode)
        parts = torch.cat([gradient(rows, loss) for rows in torch.arange(6).split([1, 2, 3])])
        torch.testing.assert_close(parts, gradient(torch.arange(6), loss))
        assert parts.abs().sum() > 0


def test_the_status_of_a_step_has_the_regions_metrics_averaged_over_tokens():
    batch = batch_of("dppo-binary-tv")
    _, status = step(batch, world.arguments(*world.RECORDED))
    metrics, weights = status["metrics"], status["weights"]
    assert {"policy_loss", "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"} <= set(metrics)
    ours = {name for name in metrics if name.startswith("trustrl/")}
    assert {"trustrl/masked_share", "trustrl/kl_k3", "trustrl/dropped_share"} <= ours
    assert all(weights[name] == "token" for name in ours)
    factors = parity.read("dppo-binary-tv").factors
    stopped = ((factors == 0) & batch.in_loss & (batch.advantage != 0)).sum() / batch.in_loss.sum()
    assert metrics["ppo_clip_ratio"].item() == pytest.approx(stopped.item(), abs=1e-6)
    assert metrics["is_filter_ratio"] == 0


def test_a_region_on_the_trainer_alone_needs_no_record(monkeypatch):
    monkeypatch.setenv("TRUSTRL_REGION", '{"preset": "ppo", "anchor": "proximal"}')
    gradient, status = step(batch_of("ppo"), world.arguments("--train.max_epochs", 2), recorded=False)
    assert gradient.abs().sum() > 0
    assert not {"vllm_kl", "is_filter_ratio"} & set(status["metrics"])


def test_a_missing_record_is_never_replaced():
    with pytest.raises(MissingDataError, match=r"rollout_log_probs must be given with dppo, got None\. Set --algo"):
        step(batch_of("dppo-binary-tv"), world.arguments(*world.RECORDED), recorded=False)


def test_nan_outside_the_loss_changes_nothing():
    batch = parity.read("dppo-binary-tv").batch
    found = []
    for fill in (-1.0, float("nan")):
        logp = torch.where(batch.in_loss, batch.logp, fill).requires_grad_(True)
        rest = [torch.where(batch.in_loss, x, fill) for x in (batch.proximal_logp, batch.advantage)]
        recorded = torch.where(batch.in_loss, batch.behavior_logp, fill)
        outputs = engine.RegionLoss(trustrl.preset("dppo-binary-tv"))(logp, *rest, batch.in_loss.long(), recorded)
        outputs[0].backward()
        found.append((logp.grad, *outputs))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_worker_checks_the_arguments_again():
    with pytest.raises(ConfigError, match=r"--actor\.dual_clip must be left out"):
        world.trainer(world.arguments(*world.RECORDED, "--actor.dual_clip", 3.0), None)


def test_a_loss_with_other_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(PolicyLoss, "forward", lambda self, log_probs: None)
    with pytest.raises(EngineError, match=r"PolicyLoss\.forward must take .*got \('self', 'log_probs'\)"):
        engine.RegionLoss(trustrl.preset("ppo"))


def test_an_old_openrlhf_is_refused(monkeypatch):
    monkeypatch.setattr(losses.seam.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(EngineError, match=r"openrlhf must be at least 0\.11\.2, got 0\.9\.0"):
        engine.RegionLoss(trustrl.preset("ppo"))


def test_the_trainer_is_replaced_once():
    engine.install()
    assert ppo_actor.ActorPPOTrainer.__module__ == "trustrl.engines.openrlhf.trainer"
    assert ppo_actor.ActorPPOTrainer.__base__.__module__ == "openrlhf.trainer.ray.ppo_actor"
