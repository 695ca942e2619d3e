"""The compiled steps of the loss: verdicts, counts, loss and gradients of the eager steps, sums to float32's error."""

import warnings
from dataclasses import replace

import pytest
import torch

import trustrl
from support.worlds import gradient, world
from trustrl import regions
from trustrl.core.diagnostics import histogram
from trustrl.core.impl import choice, compiled, eager
from trustrl.core.partition import flat_columns

pytestmark = pytest.mark.compiled

FROM_COLUMNS = ("divergence", "divergence/upper", "max/divergence", "tail/", "extra/projected_kl")
"""Sums of numbers that float32 arithmetic on the columns has made. All others are the definition's."""

REGIONS = {
    "top-20 tv": trustrl.preset("dppo-topk-tv"),
    "top-20 kl": trustrl.preset("dppo-topk-kl"),
    "fewer columns than recorded": regions.DPPO(regions.TopKTV(k=3)),
    "two bounds": regions.DPPO(regions.TopKKL(k=20, max_increase=0.02, max_decrease=0.2)),
    "upper end": regions.DPPO(regions.TopKTV(k=20, act_on="upper")),
    "troll": regions.TROLL(k=20),
    "narrow record": regions.TROLL(k=30, tail_mass=0.05),
}
CASES = [(name, torch.float32) for name in REGIONS]
CASES += [(name, torch.bfloat16) for name in ("top-20 tv", "top-20 kl", "troll")]


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    """torch.compile gives up on a function after eight kinds of input."""
    torch.compiler.reset()


def records(region, *, dtype=torch.float32, faulty=False, tails=False, rows=6, width=17):
    """One micro-batch as (policy, rollout), made anew so that gradients do not mix."""
    w = world(7, rows=rows, width=width)
    rollout = w.rollout(region.needs().anchor, dtype=dtype, with_tails=tails)
    policy = w.policy_tokens(rollout, dtype=dtype)
    if faulty:
        with torch.no_grad():
            policy.logp[0, 0], policy.logp[0, 1] = torch.nan, 0.5
            rollout.behavior_logp[0, 2], rollout.proximal_logp[0, 2] = -torch.inf, torch.nan
            rollout.advantage[1, 1] = torch.inf
            policy.topk_logp[1, 2, 3], policy.topk_logp[1, 4, 3] = torch.nan, torch.inf
            rollout.topk.logp[1, 3, 2] = 0.7
            policy.topk_logp[2] = -0.01  # more mass than 1
            policy.topk_logp[3, 1] -= 0.3  # the sampled token's column disagrees with its log-prob
            rollout.token_ids[4, 1] = -5
    return policy, rollout


def both(region, **settings):
    """(eager, compiled), each as (output, gradients)."""
    got = []
    for impl in ("eager", "compiled"):
        policy, rollout = records(region, **settings)
        assert compiled.covers(policy, rollout, region, region.needs())
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl=impl)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()
        got.append((out, gradient(policy)))
    return got


def must_agree(want, got):
    (a, a_grads), (b, b_grads) = want, got
    assert torch.equal(a.decision.keep, b.decision.keep)
    assert torch.equal(a.loss, b.loss)
    for x, y in zip(a_grads, b_grads, strict=True):
        assert torch.equal(x, y)
    for x, y in ((a.sums.added, b.sums.added), (a.sums.highest, b.sums.highest)):
        assert x.keys() == y.keys()
        for name, value in x.items():
            if name.startswith("histogram/divergence"):
                assert value.sum() == y[name].sum(), name
            elif name in FROM_COLUMNS or name.startswith(FROM_COLUMNS[3:]):
                torch.testing.assert_close(
                    y[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
                )
            else:
                torch.testing.assert_close(
                    y[name], value, rtol=1e-14, atol=0.0, msg=lambda m, name=name: f"{name}: {m}"
                )
    if a.decision.divergence is not None:
        for x, y in zip(a.decision.divergence, b.decision.divergence, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_region_agrees_with_and_without_faults(name, dtype):
    must_agree(*both(REGIONS[name], dtype=dtype))
    want, got = both(REGIONS[name], dtype=dtype, faulty=True)
    must_agree(want, got)
    if name.startswith("top-20") and dtype == torch.float32:
        kinds = ("policy", "advantage", "support", "mass", "column")
        assert all(want[0].sums.added[f"fault/{kind}"] > 0 for kind in kinds)


@pytest.mark.parametrize("name", ["top-20 tv", "top-20 kl", "troll"])
def test_recorded_tails_agree(name):
    must_agree(*both(REGIONS[name], faulty=True, tails=True))


@pytest.mark.parametrize("on_nonfinite", ["drop", "zero"])
def test_faulty_tokens_count_alike_in_their_sequence(on_nonfinite):
    region, got = REGIONS["top-20 tv"], []
    for impl in ("eager", "compiled"):
        policy, rollout = records(region, faulty=True)
        out = trustrl.policy_loss(
            policy, rollout, region, reduction=trustrl.SequenceMeanTokenMean(num_sequences=6),
            on_nonfinite=on_nonfinite, impl=impl, penalties=[trustrl.EntropyBonus(coefficient=0.01)],
        )  # fmt: skip
        out.loss.backward()
        got.append((out, gradient(policy)))
    must_agree(*got)


def test_batches_of_other_sizes_and_without_tokens_in_the_loss_agree():
    for rows, width in ((1, 1), (3, 40), (2, 9), (5, 31)):
        must_agree(*both(REGIONS["top-20 tv"], rows=rows, width=width))
    got = []
    for impl in ("eager", "compiled"):
        policy, rollout = records(REGIONS["top-20 tv"])
        rollout = replace(rollout, in_loss=torch.zeros_like(rollout.in_loss))
        out = trustrl.policy_loss(policy, rollout, REGIONS["top-20 tv"], reduction=trustrl.TokenSum(), impl=impl)
        out.loss.backward()
        got.append((out, gradient(policy)))
    must_agree(*got)
    w = world(7, rows=0, width=5)
    rollout = w.rollout(dtype=torch.float32)
    policy = w.policy_tokens(rollout, dtype=torch.float32)
    out = trustrl.policy_loss(policy, rollout, REGIONS["top-20 tv"], reduction=trustrl.TokenSum(), impl="compiled")
    assert out.loss == 0


def test_histograms_count_the_distances_of_the_decision():
    _, (out, _) = both(REGIONS["top-20 tv"])
    policy, rollout = records(REGIONS["top-20 tv"])
    usable = rollout.in_loss.reshape(-1).double()
    for name, end in (("divergence", 0), ("divergence_upper", 1)):
        assert torch.equal(
            out.sums.added[f"histogram/{name}"], histogram(out.decision.divergence[end].reshape(-1), usable)
        )


@pytest.mark.parametrize("name", ["top-20 tv", "top-20 kl", "troll"])
def test_the_error_is_within_its_bound(name):
    """Tokens in the thousands, so that the bound is tested and not only met by chance."""
    region = REGIONS[name]
    policy, rollout = records(region, rows=40, width=100)
    needs = region.needs()
    columns, resolution = flat_columns(policy, rollout, needs)
    sums = compiled._summed(compiled.Request(policy, rollout, region, needs, "drop", columns), resolution)
    exact = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl="eager").decision
    got = sums.distance
    if name != "troll":
        got = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl="compiled").decision
        got = got.divergence.lower.reshape(-1)
    want = exact.extra["projected_kl_before"] if name == "troll" else exact.divergence.lower
    usable = rollout.in_loss.reshape(-1)
    error = (got - want.reshape(-1)).abs()[usable]
    assert (error > 0).float().mean() > 0.9  # float32 was used
    assert (error <= sums.error[usable]).all()


def test_tokens_at_the_bound_are_decided_in_float64():
    """Each token's own distance as the bound: float32 would decide half of them by chance."""
    region = REGIONS["top-20 tv"]
    policy, rollout = records(region, rows=2, width=12)
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl="eager")
    lower = out.decision.divergence.lower
    for bound in lower[rollout.in_loss & (lower > 0)].tolist():
        region_there = regions.DPPO(regions.TopKTV(k=20, max_increase=bound, max_decrease=bound))
        want, got = (
            trustrl.policy_loss(policy, rollout, region_there, reduction=trustrl.TokenSum(), impl=impl)
            for impl in ("eager", "compiled")
        )
        assert torch.equal(want.decision.keep, got.decision.keep)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "ppo", "gspo", "troll-gspo"])
def test_other_regions_are_left_to_the_eager_steps(name):
    region = trustrl.preset(name)
    policy, rollout = records(region)
    assert choice.implementation("compiled", policy, rollout, region, region.needs()) is eager


def test_columns_in_float64_are_left_to_the_eager_steps():
    region = REGIONS["top-20 tv"]
    policy, rollout = records(region, dtype=torch.float64)
    assert choice.implementation("compiled", policy, rollout, region, region.needs()) is eager


def test_auto_never_compiles_and_the_variable_does(monkeypatch):
    _, rollout = records(REGIONS["top-20 tv"])
    assert choice.resolved("auto", rollout) == "eager"
    monkeypatch.setenv(choice.VARIABLE, "compiled")
    assert choice.resolved("auto", rollout) == "compiled"


def test_without_a_compiler_the_eager_steps_run_with_one_warning(monkeypatch):
    def broken(function):
        raise RuntimeError("no g++")

    compiled.works.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    region = REGIONS["top-20 tv"]
    policy, rollout = records(region)
    with pytest.warns(trustrl.errors.TrustRLWarning, match=r"no g\+\+"):
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl="compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.errors.TrustRLWarning)
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl="compiled")
    compiled.works.cache_clear()
