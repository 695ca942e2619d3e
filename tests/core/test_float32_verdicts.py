"""Verdicts in float32, for a device without float64. None is here: on a CPU the choice of the dtype is replaced."""

import math
from importlib import import_module

import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl.core.numerics import largest_exponent

CHOOSERS = ("trustrl.core.clean", "trustrl.core.divergences")


@pytest.fixture
def in_float32(monkeypatch):
    """Makes verdicts from now on in float32."""

    def switch():
        for name in CHOOSERS:
            monkeypatch.setattr(import_module(name), "verdict_dtype", lambda like: torch.float32)

    return switch


def rates_of(name):
    out, _ = run(name, world(3, rows=8, drift=0.3), dtype=torch.float32)
    rates = trustrl.rates(out.sums)
    rates.pop("trustrl/projected_evaluations", None)  # a solver's steps: fewer for a coarser answer
    return rates, out


@pytest.mark.parametrize("name", trustrl.presets())
def test_rates_of_an_ordinary_batch_are_those_of_float64_to_float32_s_accuracy(name, in_float32):
    expected, out = rates_of(name)
    assert out.sums.added["ratio"].dtype == torch.float64
    in_float32()
    found, out = rates_of(name)
    assert out.sums.added["ratio"].dtype == torch.float32
    assert all(x.isfinite().all() for x in out.sums.added.values())
    assert found == pytest.approx(expected, rel=2e-5, abs=2e-6)


def batch(log_ratios, advantages):
    """Tokens with these log-ratios; the likelier side has a probability of almost 1."""
    x = torch.tensor([log_ratios], dtype=torch.float32)
    policy = trustrl.PolicyTokens(logp=(x.clamp(max=0.0) - 1e-3).requires_grad_())
    rollout = trustrl.RolloutTokens(
        behavior_logp=(-x).clamp(max=0.0) - 1e-3,
        advantage=torch.tensor([advantages], dtype=torch.float32),
        in_loss=torch.ones_like(x, dtype=torch.bool),
    )
    return policy, rollout


@pytest.mark.parametrize("log_ratio", [50.0, 90.0, 300.0])
def test_extreme_ratios_stay_finite_and_are_held_at_the_dtype_s_limit(log_ratio, in_float32):
    in_float32()
    log_ratios = [log_ratio] * 1000 + [-log_ratio] * 1000
    policy, rollout = batch(log_ratios, [1.0] * 2000)
    out = trustrl.policy_loss(
        policy, rollout, trustrl.preset("dppo-binary-tv"), reduction=trustrl.TokenMean(num_tokens=2000)
    )
    assert all(x.isfinite().all() for x in out.sums.added.values())
    limit = math.exp(largest_exponent(torch.float32))
    assert out.sums.added["ratio"].item() == pytest.approx(1000 * limit, rel=1e-5)
    assert out.sums.added["ratio/square"].item() == pytest.approx(1000 * limit**2, rel=1e-5)
    assert out.sums.added["log_ratio/square"].item() == pytest.approx(2000 * log_ratio**2, rel=1e-5)
    assert out.sums.highest["max/log_ratio"].item() == pytest.approx(log_ratio)
    rates = trustrl.rates(out.sums)
    assert rates["trustrl/ratio_max"] == pytest.approx(math.exp(log_ratio), rel=1e-4)
    assert rates["trustrl/kl_k2"] == pytest.approx(log_ratio**2 / 2, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_squares_of_a_trillion_largest_summands_add_up_to_a_finite_number(dtype):
    summand = torch.tensor(largest_exponent(dtype), dtype=dtype).exp()
    assert (summand.square() * 1e12).isfinite()
