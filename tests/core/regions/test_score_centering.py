"""Score centering: the closed form, the expectation of its gradient over every token, and the tail's bias."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import trustrl
from support import oracle
from support.worlds import run, world
from trustrl import regions

V = 12
WEIGHTS = {
    "w = 1": (None, lambda r: 1.0),
    "w = min(r, 1.2)": (regions.TIS(max_ratio=1.2), lambda r: min(r, 1.2)),
    "w = r within a band": (
        regions.IcePop(min_ratio=0.7, max_ratio=1.5),
        lambda r: r if 0.7 <= r <= 1.5 else 0.0,
    ),
    "w = r": (regions.TIS(max_ratio=math.inf), lambda r: r),
}


def pair(seed, *, vocabulary=V, drift=0.7):
    """Logits of π, and μ, float64."""
    g = torch.Generator().manual_seed(seed)
    logits, noise = (torch.randn(vocabulary, generator=g, dtype=torch.float64) for _ in range(2))
    return 1.5 * logits, torch.softmax(1.5 * logits + drift * noise, -1)


def records(logits, mu, token, advantage, k, *, with_tails=False):
    """Both sides of one position for several sampled tokens. `logits` is (n, V), with gradient if wanted."""
    behavior, policy = mu.log().expand(len(token), -1), torch.log_softmax(logits, -1)
    ids = behavior.topk(k, -1).indices
    at = token.unsqueeze(-1)
    known = torch.zeros_like(behavior, dtype=torch.bool).scatter(-1, ids, True).scatter(-1, at, True)
    tails = [x.masked_fill(known, -torch.inf).logsumexp(-1) if with_tails else None for x in (behavior, policy)]
    rollout = trustrl.RolloutTokens(
        behavior_logp=behavior.gather(-1, at).squeeze(-1),
        advantage=advantage,
        in_loss=torch.ones_like(token, dtype=torch.bool),
        token_ids=token,
        topk=trustrl.TopK(ids, behavior.gather(-1, ids), "behavior", tails[0]),
        full=trustrl.FullVocabulary(behavior, "behavior"),
    )
    tokens = trustrl.PolicyTokens(
        logp=policy.gather(-1, at).squeeze(-1),
        topk_logp=policy.gather(-1, ids),
        full_logp=policy,
        tail_logp=tails[1],
    )
    return tokens, rollout


def gradients(region, logits, mu, advantage=None, **kwargs):
    """The gradient of the loss by the logits, (V, V): one row for each token that could have been sampled."""
    token = torch.arange(len(mu))
    advantage = torch.ones_like(mu) if advantage is None else advantage
    x = logits.expand(len(mu), -1).clone().requires_grad_()
    tokens, rollout = records(x, mu, token, advantage, region.k, **kwargs)
    trustrl.policy_loss(tokens, rollout, region, reduction=trustrl.TokenSum()).loss.backward()
    return x.grad


def outside(mu, k):
    """True on the ids that are not among the k most probable."""
    return torch.ones_like(mu, dtype=torch.bool).index_fill(0, mu.topk(k).indices, False)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("with_tails", [False, True], ids=["tails by subtraction", "tails recorded"])
@pytest.mark.parametrize("k", [1, 4, V - 1])
def test_the_gradient_is_the_closed_form(weight, with_tails, k):
    setting, f = WEIGHTS[weight]
    for seed in range(4):
        logits, mu = pair(seed)
        advantage = torch.linspace(-2, 2, V, dtype=torch.float64)
        got = gradients(regions.ScoreCentering(k=k, weight=setting), logits, mu, advantage, with_tails=with_tails)
        p = torch.softmax(logits, -1).numpy()
        want = [oracle.centered_gradient(mu.numpy(), p, a, advantage[a].item(), k, f) for a in range(V)]
        np.testing.assert_allclose(got.numpy(), np.stack(want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{"support": "full"}, {"k": V}], ids=["full support", "every id recorded"])
def test_the_expected_gradient_of_a_constant_advantage_is_0(weight, seed, settings):
    """Σ_a μ(a)·gradient(a) = 0 on the whole vocabulary, however far π is from μ."""
    logits, mu = pair(seed, drift=1.0)
    found = gradients(regions.ScoreCentering(**{"k": V} | settings, weight=WEIGHTS[weight][0]), logits, mu)
    assert found.abs().max() > 0.1
    assert (mu @ found).abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 3, 6, V - 1])
@pytest.mark.parametrize("with_tails", [False, True], ids=["tails by subtraction", "tails recorded"])
def test_the_expected_gradient_over_the_cells_is_0(k, with_tails):
    """With a tail: 0 at each of the top K logits, and 0 in the sum over the others."""
    logits, mu = pair(5)
    expected = mu @ gradients(regions.ScoreCentering(k=k), logits, mu, with_tails=with_tails)
    rest = outside(mu, k)
    assert expected[~rest].abs().max() < 1e-12
    assert expected[rest].sum().abs() < 1e-12


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_bias_of_the_tail_is_the_one_on_the_page(k):
    """−A·(μ_v − ρ π_v) at each logit outside the top K, of norm ≤ 2·m·TV(μ|tail, π|tail)·|A|."""
    logits, mu = pair(6)
    expected = mu @ gradients(regions.ScoreCentering(k=k), logits, mu)
    rest, p = outside(mu, k), torch.softmax(logits, -1)
    m, q = mu[rest].sum(), p[rest].sum()
    torch.testing.assert_close(expected[rest], -(mu - m / q * p)[rest], rtol=0, atol=1e-12)
    bound = m * (mu[rest] / m - p[rest] / q).abs().sum()
    assert 1e-3 < expected.abs().sum() <= bound + 1e-12


def test_a_tail_proportional_to_the_policys_has_no_bias():
    logits, mu = pair(7, drift=0.2)
    rest, p = outside(mu, 4), torch.softmax(logits, -1)
    mu = torch.where(rest, mu[rest].sum() / p[rest].sum() * p, mu)
    assert torch.equal(outside(mu, 4), rest)
    assert (mu @ gradients(regions.ScoreCentering(k=4), logits, mu)).abs().max() < 1e-12


def test_plain_policy_gradient_drifts_towards_the_sampler():
    """The control: without the centering term the same sum is −A·(μ − π)."""
    logits, mu = pair(8)
    x = logits.expand(V, -1).clone().requires_grad_()
    torch.log_softmax(x, -1).diagonal().sum().neg().backward()
    drift = torch.softmax(logits, -1) - mu
    torch.testing.assert_close(mu @ x.grad, drift, rtol=0, atol=1e-12)
    assert drift.abs().max() > 0.05


def test_the_covariance_with_the_advantage_is_kept():
    """For any advantage the expected gradient on the whole vocabulary is −Cov_μ(A, ∇log π)."""
    logits, mu = pair(9)
    advantage = torch.randn(V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = mu @ gradients(regions.ScoreCentering(k=V, support="full"), logits, mu, advantage)
    centered = advantage - mu @ advantage
    scores = torch.eye(V, dtype=torch.float64) - torch.softmax(logits, -1)
    torch.testing.assert_close(expected, -(mu * centered) @ scores, rtol=0, atol=1e-12)


def test_on_policy_nothing_is_subtracted():
    """With π = μ the sampler expects a score of 0, for any k."""
    logits, _ = pair(10)
    mu, scores = torch.softmax(logits, -1), torch.eye(V, dtype=torch.float64) - torch.softmax(logits, -1)
    for k in (1, 5, V):
        found = gradients(regions.ScoreCentering(k=k), logits, mu)
        torch.testing.assert_close(found, -scores, rtol=0, atol=1e-12)


def test_uncapped_weights_are_plain_importance_sampling():
    """w = r: the sampler's expectation of r ∇log π is 0, tail or not."""
    w = world(2, vocabulary=40, drift=0.6)
    for k in (5, 40):
        region = regions.ScoreCentering(k=k, weight=regions.TIS(max_ratio=math.inf))
        x, y = (torch.log_softmax(w.policy, -1).clone().requires_grad_() for _ in range(2))
        for one, at in ((region, x), (regions.PolicyGradient(), y)):
            p = torch.log_softmax(at, -1)
            rollout = w.rollout(k=k)
            tokens = trustrl.PolicyTokens(logp=w.at_token(p), topk_logp=p.gather(-1, rollout.topk.ids))
            trustrl.policy_loss(tokens, rollout, one, reduction=trustrl.TokenSum()).loss.backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("weight", [None, regions.IcePop(min_ratio=0.7, max_ratio=1.5)], ids=["w = 1", "in a band"])
@pytest.mark.parametrize("support", ["topk", "full"])
def test_gradcheck_with_the_coefficients_held(weight, support):
    """Finite differences of Σ sg(b w)·log π: the coefficients come from a detached copy of the same logits."""
    logits, mu = pair(11, vocabulary=6)
    advantage, k = torch.linspace(-1, 1, 6, dtype=torch.float64), 3
    region = regions.ScoreCentering(k=k, support=support, weight=weight)
    p = torch.softmax(logits, -1)
    f = (lambda r: torch.ones_like(r)) if weight is None else lambda r: torch.where((r >= 0.7) & (r <= 1.5), r, 0.0)
    rest = outside(mu, k if support == "topk" else 6)
    m, q = mu[rest].sum(), p[rest].sum()
    held = mu * f(p / mu)
    own = f(p / mu)

    def written_out(x):
        policy = torch.log_softmax(x, -1)
        expected = policy[:, ~rest] @ held[~rest]
        if rest.any():
            expected = expected + m * f(q / m) * policy[:, rest].logsumexp(-1)
        return -(advantage * (own * policy.diagonal() - expected)).sum()

    x = logits.expand(6, -1).clone().requires_grad_()
    assert torch.autograd.gradcheck(written_out, (x,))
    (want,) = torch.autograd.grad(written_out(x), x)
    torch.testing.assert_close(gradients(region, logits, mu, advantage), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("token", "advantage", "want"),
    [
        pytest.param(0, 1.0, (-0.4, 0.2, 0.2), id="a recorded token, rewarded"),
        pytest.param(0, -1.0, (0.4, -0.2, -0.2), id="the same token, punished"),
        pytest.param(1, 1.0, (0.6, -0.8, 0.2), id="a token of the tail, rewarded"),
        pytest.param(2, 1.0, (0.6, 0.2, -0.8), id="the other token of the tail"),
        pytest.param(0, 0.0, (0.0, 0.0, 0.0), id="no advantage, no gradient"),
    ],
)
def test_a_table_by_hand(token, advantage, want):
    """μ = (0.6, 0.2, 0.2), K = 1. The gradient is −A·(e_a − (0.6, 0.4·π_v/π_tail)): π enters by its tail's shape alone."""
    mu = torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64)
    for p in ([0.5, 0.25, 0.25], [0.9, 0.05, 0.05]):
        logits = torch.tensor(p, dtype=torch.float64).log()
        every = torch.full((3,), advantage, dtype=torch.float64)
        found = gradients(regions.ScoreCentering(k=1), logits, mu, every)[token]
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_policy_without_a_tail_stays_finite():
    """μ has 0.3 outside the top K, π as little as float32 can express or nothing at all."""
    for tail in (1e-9, 1e-30, 0.0):
        p = torch.tensor([0.5, 0.5 - tail, tail / 2, tail / 2], dtype=torch.float64)
        x = p.log().expand(4, -1).to(torch.float32).clone().requires_grad_()
        mu = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        tokens, rollout = records(x[:2].double(), mu, torch.arange(2), torch.ones(2), 2)
        out = trustrl.policy_loss(tokens, rollout, regions.ScoreCentering(k=2), reduction=trustrl.TokenSum())
        out.loss.backward()
        assert x.grad[:, :2].isfinite().all()
        assert x.grad[:, :2].abs().max() < 1


def test_a_full_correction_of_a_proximal_anchor_is_centered_too():
    """a ~ μ, centered on π', and the factor π'(a)/μ(a): the expectation is that under π', which is 0."""
    logits, mu = pair(12)
    other = torch.softmax(logits + 0.3 * torch.randn(V, generator=torch.Generator().manual_seed(3)), -1)
    x = logits.expand(V, -1).clone().requires_grad_()
    tokens, rollout = records(x, other, torch.arange(V), torch.ones_like(mu), V)
    rollout = replace(
        rollout,
        behavior_logp=mu.log(),
        proximal_logp=other.log(),
        topk=replace(rollout.topk, of="proximal"),
    )
    region = regions.ScoreCentering(k=V, anchor="proximal", correction=regions.TIS(max_ratio=math.inf))
    trustrl.policy_loss(tokens, rollout, region, reduction=trustrl.TokenSum()).loss.backward()
    assert (mu @ x.grad).abs().max() < 1e-12


def test_the_cap_is_counted():
    w = world(9, drift=1.0)
    out, _ = run(regions.ScoreCentering(k=20, weight=regions.TIS(max_ratio=1.5)), w)
    ratio = (w.at_token(w.policy) - w.at_token(w.behavior)).exp()
    capped = ((ratio > 1.5) & w.in_loss).double().sum() / w.in_loss.sum()
    assert 0 < trustrl.rates(out.sums)["trustrl/capped_share"] == pytest.approx(capped.item())


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("with_tails", [False, True], ids=["tails by subtraction", "tails recorded"])
def test_the_kernels_give_the_same_gradient(weight, with_tails):
    pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")
    w = world(4, rows=3, width=5, vocabulary=40, drift=0.5)
    region = regions.ScoreCentering(k=10, weight=WEIGHTS[weight][0])
    found = []
    for impl in ("eager", "triton"):
        rollout = w.rollout(k=10, dtype=torch.float32, with_tails=with_tails)
        policy = w.policy_tokens(rollout, dtype=torch.float32)
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl=impl).loss.backward()
        found.append([policy.logp.grad, policy.topk_logp.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("with_tails", [False, True], ids=["tails by subtraction", "tails recorded"])
def test_a_faulty_record_leaves_finite_numbers_everywhere(with_tails):
    """NaN on one side of one token: it is dropped, and its neighbors have the gradient that they have without it."""
    w = world(6, rows=2, width=4, vocabulary=30)
    w.in_loss.fill_(True)
    region, found = regions.ScoreCentering(k=8), []
    for broken in (False, True):
        rollout = w.rollout(k=8, with_tails=with_tails)
        policy = w.policy_tokens(rollout)
        if broken:
            rollout.topk.logp[0, 0] = torch.nan
            rollout.behavior_logp[0, 1] = torch.nan
            if with_tails:
                rollout.topk.tail_logp[0, 2] = torch.nan
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
        out.loss.backward()
        assert out.decision.logp.isfinite().all()
        found.append(policy.topk_logp.grad)
    lost = 3 if with_tails else 2
    assert (found[1][0, :lost] == 0).all()
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0)
