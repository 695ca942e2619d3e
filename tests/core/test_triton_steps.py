"""The Triton steps of the loss under Triton's interpreter: verdicts, counts, sums and gradients of the eager steps.

Triton reads TRITON_INTERPRET when it is first imported, so the checks run in a process of their own:
`TRITON_INTERPRET=1 pytest tests/core/test_triton_steps.py`, or through the one test here that starts it.
"""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import trustrl
from contracts.test_second_derivatives import MESSAGE, case, loss_of
from support.device_counts import counted
from support.kernel_counts import launches, limits, loss_and_sums, micro_batch, torch_release
from support.worlds import gradient, reduction_for, world
from trustrl import regions

pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")

pytestmark = [
    pytest.mark.compiled,
    # The interpreter is numpy, which warns of inf − inf in values that the kernel discards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_everything_here_under_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_everything_here_under_the_interpreter():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


def records(region, seed, dtype, *, faulty, tails=False, packed=False):
    """One micro-batch as (policy, rollout, world), made anew so that gradients do not mix."""
    needs, w = region.needs(), world(seed, rows=5, width=11)
    version = torch.randint(0, 20, w.tokens.shape, generator=torch.Generator().manual_seed(1))
    k = min(max(needs.topk, 20), 48)
    rollout = w.rollout(needs.anchor, dtype=dtype, k=k, with_tails=tails, version=version)
    policy = replace(w.policy_tokens(rollout, dtype=dtype), version=20)
    if needs.fills:
        own = w.policy.topk(k, dim=-1)
        policy = replace(policy, topk=trustrl.TopK(own.indices, own.values.to(dtype).requires_grad_()))
    if faulty:
        with torch.no_grad():
            policy.logp[0, 0], policy.logp[0, 1] = torch.nan, 0.5
            rollout.behavior_logp[0, 2], rollout.proximal_logp[0, 3] = -torch.inf, torch.nan
            rollout.advantage[1, 1] = torch.inf
            policy.topk_logp[1, 2, 3] = torch.nan
            rollout.topk.logp[1, 3, 2] = 0.7
            policy.topk_logp[2] = -0.01  # more mass than 1
            policy.topk_logp[3, 1] -= 0.3  # the sampled token's column disagrees with its log-prob
            policy.entropy[2, 2] = torch.inf
    if packed:
        rollout = replace(rollout, sequence_ids=torch.arange(5)[:, None].expand(5, 11) * 7 % 3)
    return policy, rollout, w


def both(region, *arguments, reduction=None, **settings):
    """(eager, Triton), each as (output, gradients)."""
    got = []
    for impl in ("eager", "triton"):
        policy, rollout, w = records(region, *arguments, **settings)
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction or reduction_for(region, w), impl=impl)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()
        got.append((out, gradient(policy)))
    return got


def must_agree(want, got):
    (a, a_grads), (b, b_grads) = want, got
    assert torch.equal(a.decision.keep, b.decision.keep)
    torch.testing.assert_close(b.loss, a.loss, rtol=2e-6, atol=2e-6)  # terms rounded to float32 there
    for x, y in ((a.sums.added, b.sums.added), (a.sums.highest, b.sums.highest)):
        assert x.keys() == y.keys()
        for name, value in x.items():
            exact = 2e-6 if name.startswith("loss/") else 1e-12
            torch.testing.assert_close(y[name], value, rtol=exact, atol=exact, msg=lambda m, name=name: f"{name}: {m}")
    for x, y in zip(a_grads, b_grads, strict=True):
        torch.testing.assert_close(y, x)


@interpreted
@pytest.mark.parametrize(("dtype", "faulty"), [(torch.float32, True), (torch.bfloat16, False)], ids=["faulty", "bf16"])
@pytest.mark.parametrize("name", trustrl.presets())
def test_every_preset_agrees(name, dtype, faulty):
    region = trustrl.preset(name)
    must_agree(*both(region, 3, dtype, faulty=faulty))


@interpreted
@pytest.mark.parametrize("name", ["dppo-topk-tv", "dppo-topk-kl", "troll"])
def test_recorded_tails_agree(name):
    must_agree(*both(trustrl.preset(name), 4, torch.float32, faulty=True, tails=True))


OTHERS = {
    "fewer columns than recorded": regions.DPPO(regions.TopKTV(k=3)),
    "tightened by age": replace(trustrl.preset("dppo-topk-tv"), max_staleness=3, when_stale="tighten"),
    "dropped by age": replace(trustrl.preset("dppo-binary-tv"), max_staleness=3),
    "penalty": replace(trustrl.preset("ipo"), log_ratio_penalty=0.01),
    "narrow record": replace(trustrl.preset("troll"), k=50, tail_mass=0.001),
    "wide ball": replace(trustrl.preset("troll"), bound=3.0),
    "narrow ball": replace(trustrl.preset("troll"), bound=1e-3),
    "published selection": replace(trustrl.preset("troll"), k=12, rest="published", bound=0.2),
    "published selection in sequences": replace(trustrl.preset("troll-gspo"), k=12, rest="published", bound=0.2),
    "fill": replace(trustrl.preset("troll"), k=12, rest="fill", bound=0.2),
}


@interpreted
@pytest.mark.parametrize("kind", OTHERS)
def test_other_settings_agree(kind):
    must_agree(*both(OTHERS[kind], 5, torch.float32, faulty=True))


REDUCTIONS = {
    "token mean": lambda: trustrl.TokenMean(num_tokens=40),
    "sequence mean": lambda: trustrl.SequenceMeanTokenMean(num_sequences=5),
    "weights": lambda: trustrl.TokenWeights(torch.linspace(0, 1, 55).reshape(5, 11)),
}


@interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "sequence ids"])
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", ["dppo-binary-tv", "troll"])
def test_reductions_agree(name, kind, packed):
    settings = {"faulty": True, "packed": packed, "reduction": REDUCTIONS[kind]()}
    must_agree(*both(trustrl.preset(name), 6, torch.float32, **settings))


@interpreted
@pytest.mark.parametrize("name", trustrl.presets())
def test_the_hessian_of_every_preset_raises(name):
    """As tests/contracts/test_second_derivatives.py says of the eager steps."""
    w, region, rollout, logits = case(name, torch.float32)
    total = loss_of(region, w, rollout, logits, impl="triton") + logits.square().sum()
    (slope,) = torch.autograd.grad(total, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(slope.sum(), logits)


@interpreted
def test_more_tokens_than_a_block_agree():
    region = trustrl.preset("dppo-binary-tv")
    g = torch.Generator().manual_seed(0)
    behavior = -torch.rand(3, 700, generator=g)
    rollout = trustrl.RolloutTokens(
        behavior_logp=behavior,
        advantage=torch.randn(3, generator=g),
        in_loss=torch.rand(3, 700, generator=g) < 0.9,
    )
    got = []
    for impl in ("eager", "triton"):
        policy = trustrl.PolicyTokens(logp=(behavior - 0.2).requires_grad_())
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenMean(num_tokens=900), impl=impl)
        out.loss.backward()
        got.append((out, [policy.logp.grad]))
    must_agree(*got)


LAUNCHES = {"dppo-binary-tv": 60, "dppo-binary-kl": 60, "dppo-topk-tv": 80, "dppo-topk-kl": 80, "troll": 200}


@interpreted
@pytest.mark.parametrize("name", trustrl.presets())
def test_few_launches_and_no_wait(name):
    counts = loss_and_sums(name, "triton")
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)
    assert sum(counts.kernels.values()) <= LAUNCHES.get(name, 200), str(counts)


@interpreted
@pytest.mark.skipif(torch_release() != limits()["torch"], reason="another torch may split operations otherwise")
@pytest.mark.parametrize("name", trustrl.presets())
def test_launches_have_not_risen(name):
    got, recorded = launches(name), limits()[name]
    assert all(got[key] <= recorded[key] for key in got), f"{got}, recorded {recorded}"


@pytest.fixture
def launches_count_on_a_cpu(monkeypatch):
    """ "auto" takes the CPU for a GPU, and has checked nothing yet."""
    from trustrl.core.impl import choice

    monkeypatch.setattr(choice, "launches_count", lambda x: True)
    monkeypatch.setattr(choice, "_CHECKED", {})
    return choice


def run_auto():
    policy, rollout, region, reduction = micro_batch("dppo-topk-tv")
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
    out.loss.backward()
    return out, gradient(policy)


@interpreted
def test_auto_checks_once_on_a_cpu_taken_for_a_gpu(launches_count_on_a_cpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.errors.TrustRLWarning)
        run_auto()
        run_auto()
    assert list(launches_count_on_a_cpu._CHECKED.values()) == [True]
    policy, rollout, region, reduction = micro_batch("dppo-topk-tv")
    with counted() as counts:
        trustrl.policy_loss(policy, rollout, region, reduction=reduction)
    assert not counts.waits, str(counts)
    assert counts.kernels["triton::clean_kernel"] == 1


def test_the_switch_is_read(monkeypatch):
    monkeypatch.setenv("TRUSTRL_LOSS_IMPL", "fast")
    with pytest.raises(trustrl.errors.ConfigError, match="TRUSTRL_LOSS_IMPL"):
        run_auto()


@interpreted
@pytest.mark.parametrize("wrong", ["slope", "verdict", "sum", "launch"])
def test_a_wrong_kernel_does_not_train_on_a_cpu_taken_for_a_gpu(launches_count_on_a_cpu, monkeypatch, wrong):
    from trustrl.kernels import token_pass

    clean, terms, sums = token_pass.clean, token_pass.terms, token_pass.sums

    def wrong_clean(*args, **kwargs):
        rows = clean(*args, **kwargs)
        return rows._replace(cells=(*rows.cells[:2], rows.cells[2] + 1, rows.cells[3])) if wrong == "verdict" else rows

    def wrong_terms(*args):
        if wrong == "launch":
            raise RuntimeError("no compiler")
        total, slope, overflow = terms(*args)
        return total, slope * (1.001 if wrong == "slope" else 1), overflow

    def wrong_sums(*args, **kwargs):
        added, highest = sums(*args, **kwargs)
        return {**added, "ratio": added["ratio"] + (wrong == "sum")}, highest

    for name, function in (("clean", wrong_clean), ("terms", wrong_terms), ("sums", wrong_sums)):
        monkeypatch.setattr(token_pass, name, function)
    policy, rollout, region, reduction = micro_batch("dppo-topk-tv")
    want = trustrl.policy_loss(policy, rollout, region, reduction=reduction, impl="eager")
    want.loss.backward()
    with pytest.warns(trustrl.errors.TrustRLWarning, match="Triton kernels of the loss"):
        got = run_auto()
    must_agree((want, gradient(policy)), got)
    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.errors.TrustRLWarning)
        run_auto()
