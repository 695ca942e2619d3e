"""Regions as prime-rl's custom loss, called by its own `compute_loss` and chosen by its own configuration."""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

loss = pytest.importorskip("prime_rl.trainer.rl.loss")

import torch
from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig
from pydantic import TypeAdapter

import trustrl
from support import parity
from trustrl.engines.prime_rl import losses as engine
from trustrl.errors import ConfigError, EngineError

PATH = "trustrl.engines.prime_rl.region_loss"
BOTH_ANCHORS = [name for name in parity.PRESETS if "proximal" in trustrl.preset(name).needs().anchors]
PER_CALL = [name for name in parity.PRESETS if trustrl.preset(name).needs().whole_call]  # a call is one sequence here
FED = [name for name in parity.PRESETS if name not in BOTH_ANCHORS + parity.PER_SEQUENCE + PER_CALL]
LARGEST_ERROR = 1e-6


def chosen(**kwargs):
    """The loss function that prime-rl makes from `[trainer.loss]`."""
    return loss.setup_rl_loss_fn(CustomLossConfig(import_path=PATH, kwargs=kwargs))


def run(rl_loss_fn, batch, rl_weights=None):
    """prime-rl's loss over a packed micro-batch, split in sequences as its trainer splits it."""
    packed = [x.reshape(-1).split(batch.logp.shape[1]) for x in batch]
    logp, behavior, _, advantage, in_loss = packed
    total, metrics = loss.compute_loss(
        trainer_logprobs=logp, inference_logprobs=behavior, ref_logprobs=None, advantages=advantage,
        loss_mask=in_loss, rl_weights=rl_weights, ce_weights=None, ref_kl_weights=None, rl_loss_fn=rl_loss_fn,
        rl_scale=int(batch.in_loss.sum()), ce_scale=1, ref_kl_scale=1,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(total, batch.logp)
    return gradient, metrics


def batch_of(name="dppo-binary-tv"):
    batch = parity.read(name).batch
    return batch._replace(logp=batch.logp.clone().requires_grad_(True))


def error(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_the_presets_are_those_with_one_anchor():
    assert {"dppo-binary-tv", "dppo-binary-kl", "ppo", "ipo", "pg-is"} <= set(FED)
    both = {"minirl", "tis", "tis-product", "icepop", "mis", "mis-product", "dppo-decoupled", "divergence-gate"}
    assert both == set(BOTH_ANCHORS)


@pytest.mark.parametrize("name", FED)
def test_a_preset_has_the_verdicts_and_gradients_of_the_parity_file(name):
    parity.check(name, lambda batch: run(chosen(preset=name), batch)[0], parity.token_mean)


@pytest.mark.parametrize("name", BOTH_ANCHORS)
def test_a_preset_that_reads_the_proximal_policy_is_refused(name):
    with pytest.raises(ConfigError, match=r"must not read the proximal log-probs in prime-rl, got"):
        run(chosen(preset=name), batch_of())


@pytest.mark.parametrize("name", parity.PER_SEQUENCE)
def test_a_preset_defined_per_sequence_is_refused(name):
    with pytest.raises(ConfigError, match=f"must describe a region defined per token, got {name}"):
        run(chosen(preset=name), batch_of())


@pytest.mark.parametrize("name", ["dppo-topk-tv", "troll", "dppo-full-kl"])
def test_a_region_that_reads_the_vocabulary_is_refused(name):
    with pytest.raises(ConfigError, match="must read only sampled tokens in prime-rl"):
        run(chosen(preset=name), batch_of())


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("tau", [0.0, 1e-3, 0.5])
def test_ipo_is_prime_rls_own(tau, weighted):
    """`tau` weighs the squared log-ratio, which both losses carry."""
    theirs = loss.setup_rl_loss_fn(IPOLossConfig(ipo_threshold=0.1, kl_tau=tau))
    ours = chosen(preset="ipo", max_increase=0.1, log_ratio_penalty=tau)
    batch = batch_of("ipo")
    weights = [0.3 + 0.1 * torch.arange(batch.logp.shape[1]) for _ in batch.logp] if weighted else None
    wanted, measured = run(theirs, batch, weights)
    found, metrics = run(ours, batch, weights)
    assert error(found, wanted) <= LARGEST_ERROR
    with_gradient = batch.advantage[:, 0] != 0  # ours counts no masked token where the advantage is 0
    assert torch.allclose(metrics["is_masked"][with_gradient], measured["is_masked"][with_gradient])
    assert measured["is_masked"].max() > 0


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.1, 0.3)], ids=["equal", "unequal"])
def test_dppo_is_prime_rls_default_without_its_penalty(bounds):
    low, high = bounds
    theirs = loss.setup_rl_loss_fn(DefaultLossConfig(dppo_mask_low=low, dppo_mask_high=high, kl_tau=0.0))
    ours = chosen(preset="dppo-binary-tv", divergence={"max_increase": high, "max_decrease": low}, max_ratio=None)
    batch = batch_of()
    wanted, measured = run(theirs, batch)
    found, metrics = run(ours, batch)
    assert error(found, wanted) <= LARGEST_ERROR
    with_gradient = batch.advantage[:, 0] != 0
    assert torch.allclose(metrics["is_masked"][with_gradient], measured["is_masked"][with_gradient])


def test_prime_rls_weights_multiply_the_gradient_and_a_weight_of_0_removes_a_token():
    batch, plain = batch_of(), chosen(preset="dppo-binary-tv")
    weights = torch.ones(batch.logp.shape)
    weights[0] = 0.25
    weights[1, 2] = 0.0
    found, _ = run(plain, batch, list(weights))
    wanted, _ = run(plain, batch)
    assert torch.allclose(found, wanted * weights, rtol=1e-6)
    assert wanted[1].abs().sum() > 0


def test_a_region_is_read_from_prime_rls_toml():
    text = f"""
        type = "custom"
        import_path = "{PATH}"
        [kwargs]
        kind = "dppo"
        max_ratio = 5.0
        metrics = "all"
        [kwargs.divergence]
        kind = "binary-kl"
    """
    config = TypeAdapter(CustomLossConfig).validate_python(tomllib.loads(text))
    found, metrics = run(loss.setup_rl_loss_fn(config), batch_of())
    wanted, core = run(chosen(preset="dppo-binary-kl", max_ratio=5.0), batch_of())
    assert torch.equal(found, wanted)
    assert set(core) < set(metrics)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({}, r"trainer\.loss\.kwargs must be a preset's name, or a dictionary with `preset` or `kind`, got {}"),
        ({"preset": "dppo-binary-tw"}, "Did you mean 'dppo-binary-tv'"),
        ({"preset": "ppo", "max_ration": 3.0}, "max_ration"),
        ({"preset": "ppo", "metrics": "some"}, "metrics must be"),
    ],
)
def test_bad_kwargs_are_refused_in_a_sentence(kwargs, says):
    with pytest.raises(trustrl.errors.TrustRLError, match=says):
        run(chosen(**kwargs), batch_of())


def test_metrics_are_single_numbers_of_every_sequence():
    batch = batch_of()
    _, metrics = run(chosen(preset="dppo-binary-tv"), batch)
    assert {"is_masked", "trustrl/masked_share", "trustrl/kl_k3", "trustrl/dropped_share"} <= set(metrics)
    assert all(values.shape == (len(batch.logp),) and values.dtype == torch.float32 for values in metrics.values())
    factors = parity.read("dppo-binary-tv").factors
    stopped = ((factors == 0) & batch.in_loss & (batch.advantage != 0)).sum(1)
    assert torch.allclose(metrics["is_masked"], stopped / batch.in_loss.sum(1))
    assert metrics["is_masked"].max() > 0


def test_a_sequence_without_tokens_in_the_loss_has_no_gradient():
    batch = batch_of()
    batch.in_loss[2] = False
    gradient, metrics = run(chosen(preset="dppo-binary-tv"), batch)
    assert not gradient[2].any()
    assert gradient[0].any()
    assert metrics["is_masked"][2] == 0


def test_a_bad_token_is_dropped_and_the_others_keep_their_gradient():
    batch = batch_of()
    wanted, _ = run(chosen(preset="dppo-binary-tv"), batch)
    batch.behavior_logp[0, 0] = float("nan")
    found, metrics = run(chosen(preset="dppo-binary-tv"), batch)
    wanted[0, 0] = 0
    assert torch.equal(found, wanted)
    assert metrics["trustrl/dropped_share"][0] > 0
    with pytest.raises(trustrl.errors.NonFiniteError, match="behavior: 1"):
        run(chosen(preset="dppo-binary-tv", on_nonfinite="raise"), batch)


def test_inputs_with_other_fields_are_refused():
    other = dataclasses.make_dataclass("LossInputs", engine.INPUTS[:-1])
    values = {name: torch.zeros(2) for name in engine.INPUTS[:-1]}
    with pytest.raises(EngineError, match=r"LossInputs must have the fields .*'loss_weights'\), got"):
        engine.region_loss(other(**values), preset="ppo")


def test_importing_trustrl_does_not_import_prime_rl():
    code = "import sys, trustrl, trustrl.engines; assert 'prime_rl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
