"""Divergences against a float64 brute force that imports nothing of ours."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import trustrl
from support import oracle
from trustrl.config.axes import Needs
from trustrl.core import divergences
from trustrl.core.clean import clean_tokens

SEEDS = st.integers(0, 2**32 - 1)
CASES = int(os.environ.get("TRUSTRL_CASES", "5000"))
"""Tokens per dtype; mutation testing asks for fewer."""
TOGETHER = 10
"""Tokens in one example: a call costs the same for one as for ten."""
FLOATS = {"float32": torch.float32, "float64": torch.float64}


def allowed(value, dtype):
    """The tolerance the library promises: absolute near 0, relative for large divergences."""
    if dtype == torch.float64:
        return 1e-12 * (1 + abs(value))
    return 2e-6 + 1e-5 * max(abs(value), 1.0)


def pair(seed, vocabulary, peak, drift):
    """Two distributions: drawn by seed and scale, so that large vocabularies stay cheap to describe."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=vocabulary) * peak
    moved = base + rng.normal(size=vocabulary) * drift

    def normalised(x):
        """log-softmax that is exact for a near-certain token too: its log-prob is −log1p(everything else)."""
        top = int(x.argmax())
        x = x - x[top]
        return x - math.log1p(np.exp(np.delete(x, top)).sum())

    log_b, log_p = normalised(base), normalised(moved)
    token = int(rng.choice(vocabulary, p=np.exp(log_b) / np.exp(log_b).sum()))
    if rng.random() < 0.2:
        token = int(rng.integers(vocabulary))  # also tokens the sampler would hardly have drawn
    return log_b, log_p, token


def measured(log_b, log_p, token, k, dtype):
    """Every divergence of the library on one token."""
    (found,) = measured_together([(log_b, log_p, token)], k, dtype)
    return found


def measured_together(pairs, k, dtype):
    """Every divergence on each of some tokens with vocabularies of one size, through the records a user fills."""
    exact = [
        torch.tensor(np.stack(side)) for side in ([log_b for log_b, _, _ in pairs], [log_p for _, log_p, _ in pairs])
    ]
    token = torch.tensor([token for _, _, token in pairs]).unsqueeze(-1)
    ids = torch.tensor(np.argsort(-exact[0].numpy(), axis=-1, kind="stable")[:, :k].copy())
    known = torch.zeros_like(exact[0], dtype=torch.bool).scatter(-1, ids, True).scatter(-1, token, True)
    tail_b, tail_p = (torch.logsumexp(x.masked_fill(known, -torch.inf), -1, keepdim=True).to(dtype) for x in exact)
    b, p = (x.to(dtype) for x in exact)
    at_b, at_p = b.gather(-1, token), p.gather(-1, token)
    rollout = trustrl.RolloutTokens(
        behavior_logp=at_b,
        advantage=torch.ones(len(pairs)),
        in_loss=torch.ones(len(pairs), 1, dtype=torch.bool),
        token_ids=token,
        topk=trustrl.TopK(ids.unsqueeze(1), b.gather(-1, ids).unsqueeze(1), tail_logp=tail_b),
    )
    policy = trustrl.PolicyTokens(logp=at_p, topk_logp=p.gather(-1, ids).unsqueeze(1), tail_logp=tail_p)
    tokens = clean_tokens(policy, rollout, Needs(topk=k))
    found = {
        "binary-tv": divergences.binary_tv(at_p, at_b),
        "binary-kl": divergences.binary_kl(at_p, at_b),
        "topk-tv": divergences.topk_tv(tokens.partition, tokens.log_policy, tokens.log_anchor),
        "topk-kl": divergences.topk_kl(tokens.partition, tokens.log_policy, tokens.log_anchor),
        "full-tv": divergences.full_tv(p, b),
        "full-kl": divergences.full_kl(p, b),
    }
    ends = {name: [one.flatten().tolist() for one in (x.lower, x.upper)] for name, x in found.items()}
    assert all(len(lower) == len(upper) == len(pairs) for lower, upper in ends.values())
    return [
        {name: divergences.Interval(lower[i], upper[i]) for name, (lower, upper) in ends.items()}
        for i in range(len(pairs))
    ]


def expected(log_b, log_p, token, k):
    b, p = np.exp(log_b), np.exp(log_p)
    one, some = oracle.binary(b, p, token), oracle.merged(b, p, oracle.support(b, token, k))
    return {
        "binary-tv": oracle.tv(*one),
        "binary-kl": oracle.kl(*one),
        "topk-tv": oracle.tv(*some),
        "topk-kl": oracle.kl(*some),
        "full-tv": oracle.tv(b, p),
        "full-kl": oracle.kl_fast(b, p),
    }


def compare(pairs, k, dtype):
    for one, got in zip(pairs, measured_together(pairs, k, dtype), strict=True):
        check_values_order_and_intervals(got, expected(*one, k), dtype)


def check_values_order_and_intervals(got, want, dtype):
    for name, value in want.items():
        found = float(got[name].lower)
        assert abs(found - value) <= allowed(value, dtype), f"{name}: {found} for {value}"
    lower = {name: float(interval.lower) for name, interval in got.items()}
    for kind in ("tv", "kl"):
        slack = allowed(lower[f"full-{kind}"], dtype)
        assert lower[f"binary-{kind}"] <= lower[f"topk-{kind}"] + slack
        assert lower[f"topk-{kind}"] <= lower[f"full-{kind}"] + slack
    for name in ("binary", "topk", "full"):
        exact, interval = want["full-tv"], got[f"{name}-tv"]
        assert float(interval.lower) - allowed(exact, dtype) <= exact <= float(interval.upper) + allowed(exact, dtype)
        assert want["full-kl"] <= float(got[f"{name}-kl"].upper) + allowed(want["full-kl"], dtype)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@settings(max_examples=max(CASES // TOGETHER, 1), deadline=None)
@given(
    seed=SEEDS,
    vocabulary=st.integers(2, 60),
    peak=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    drift=st.sampled_from([0.0, 1e-4, 0.03, 0.3, 2.0, 8.0]),
    k=st.integers(1, 60),
)
def test_every_divergence_equals_brute_force_and_intervals_hold(dtype, seed, vocabulary, peak, drift, k):
    """5,000 tokens in each dtype: value, order binary ≤ top-K ≤ full, and the certified interval."""
    pairs = [pair((seed, i), vocabulary, peak, drift) for i in range(TOGETHER)]
    compare(pairs, min(k, vocabulary), dtype)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@settings(max_examples=max(CASES // 125, 1), deadline=None)
@given(
    seed=SEEDS,
    peak=st.sampled_from([1.0, 3.0, 6.0]),
    drift=st.sampled_from([0.0, 0.03, 0.5]),
    k=st.sampled_from([1, 20, 64, 256]),
)
def test_the_same_at_a_vocabulary_of_151936(dtype, seed, peak, drift, k):
    compare([pair(seed, 151_936, peak, drift)], k, dtype)


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS, vocabulary=st.integers(3, 60), drift=st.sampled_from([0.03, 0.5, 3.0]), k=st.integers(1, 20))
def test_tails_by_subtraction_give_the_same_divergence_in_float64(seed, vocabulary, drift, k):
    """Without recorded tails both are 1 − Σ; on normalised float64 inputs that is as good."""
    log_b, log_p, token = pair(seed, vocabulary, 1.0, drift)
    k = min(k, vocabulary)
    ids = torch.tensor(np.argsort(-log_b, kind="stable")[:k].copy())
    b, p = torch.tensor(log_b), torch.tensor(log_p)
    rollout = trustrl.RolloutTokens(
        behavior_logp=b[[token]], advantage=torch.ones(1), in_loss=torch.tensor([True]), token_ids=torch.tensor([token]),
        topk=trustrl.TopK(ids.view(1, -1), b[ids].view(1, -1)),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=p[[token]], topk_logp=p[ids].view(1, -1))
    tokens = clean_tokens(policy, rollout, Needs(topk=k))
    want = expected(log_b, log_p, token, k)
    found = float(divergences.topk_tv(tokens.partition, tokens.log_policy, tokens.log_anchor).lower)
    assert abs(found - want["topk-tv"]) <= 1e-12


@given(seed=SEEDS)
@settings(max_examples=200, deadline=None)
def test_identical_policies_are_exactly_zero_apart(seed):
    log_b, _, token = pair(seed, 40, 3.0, 0.0)
    for name, interval in measured(log_b, log_b, token, 8, torch.float32).items():
        assert float(interval.lower) == 0.0, name


def test_kl_is_never_negative_between_near_equal_policies():
    """The plain sum is, on two tokens in five."""
    g = torch.Generator().manual_seed(0)
    b = torch.log_softmax(torch.randn(4000, 30, generator=g), -1)
    p = torch.log_softmax(b + 1e-5 * torch.randn(4000, 30, generator=g), -1)
    plain = (b.exp() * (b - p)).sum(-1)
    ours = divergences.full_kl(p, b).lower
    assert (plain < 0).float().mean() > 0.2
    assert (ours >= 0).all()
    truth = (b.double().exp() * (b.double() - p.double())).sum(-1)
    truth = truth - b.double().exp().sum(-1) + p.double().exp().sum(-1)
    assert (ours - truth).abs().max() < 1e-15


@given(x=st.floats(-700, -1e-300))
def test_pinsker_bounds_tv_by_kl(x):
    """TV ≤ √(KL/2): ties the two estimators to each other without a table of numbers."""
    for y in (-1e-9, -0.1, -3.0, -60.0):
        b, p = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
        assert divergences.binary_tv(p, b).lower <= math.sqrt(divergences.binary_kl(p, b).lower / 2) + 1e-9


def test_the_width_of_the_tv_interval_is_the_smaller_tail():
    b = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    p = torch.tensor([0.4, 0.3, 0.1, 0.2], dtype=torch.float64).log()
    interval = measured(b.numpy(), p.numpy(), 0, 2, torch.float64)["topk-tv"]
    assert float(interval.upper - interval.lower) == pytest.approx(0.3)
    binary = divergences.binary_tv(p[0], b[0])
    assert float(binary.upper - binary.lower) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("policy", "anchor", "kl"),
    [
        pytest.param(0.5, 0.5, 0.0, id="equal"),
        pytest.param(1.0, 0.5, math.inf, id="certain of what the anchor doubts"),
        pytest.param(0.0, 0.5, math.inf, id="rules out what the anchor allows"),
        pytest.param(0.5, 1.0, math.log(2), id="doubts what the anchor is certain of"),
        pytest.param(0.5, 0.0, math.log(2), id="allows what the anchor rules out"),
        pytest.param(1.0, 1.0, 0.0, id="both certain"),
        pytest.param(0.0, 0.0, 0.0, id="both rule it out"),
    ],
)
def test_binary_kl_at_the_ends(policy, anchor, kl):
    found = divergences.binary_kl(torch.tensor(policy).double().log(), torch.tensor(anchor).double().log())
    assert float(found.lower) == pytest.approx(kl)
    assert float(found.upper) >= kl
    assert not math.isnan(float(found.upper))


def test_kl_is_closed_upwards_only_without_a_tail():
    b = torch.tensor([0.5, 0.3, 0.2]).log()
    assert divergences.binary_kl(b[0], b[0]).upper == math.inf
    everything = measured(b.double().numpy(), b.double().flip(0).numpy(), 0, 3, torch.float64)["topk-kl"]
    assert everything.upper == everything.lower


def test_a_tail_only_the_anchor_has_is_infinitely_far():
    b = np.log([0.6, 0.3, 0.1])
    with np.errstate(divide="ignore"):
        p = np.log([0.7, 0.3, 0.0])
    found = measured(b, p, 0, 2, torch.float64)
    assert float(found["topk-kl"].lower) == math.inf
    assert float(found["topk-tv"].lower) == pytest.approx(0.1)


def test_rounding_of_a_tail_is_not_an_infinite_divergence():
    """With nearly all ids known in float32, 1 − Σ is 0 on one side and not on the other, on some tokens in a hundred."""
    g = torch.Generator().manual_seed(0)
    vocabulary, k, n = 2048, 2000, 500
    b = torch.log_softmax(4 * torch.randn(n, vocabulary, generator=g), -1)
    p = torch.log_softmax(b + 0.3 * torch.randn(n, vocabulary, generator=g), -1)
    logp, ids = b.topk(k, -1)
    token = ids[:, 0]
    at_token = [x.gather(-1, token.unsqueeze(-1)).squeeze(-1) for x in (b, p)]
    rollout = trustrl.RolloutTokens(
        behavior_logp=at_token[0], advantage=torch.ones(n), in_loss=torch.ones(n, dtype=torch.bool), token_ids=token,
        topk=trustrl.TopK(ids, logp),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=at_token[1], topk_logp=p.gather(-1, ids))
    tokens = clean_tokens(policy, rollout, Needs(topk=k))
    assert ((tokens.partition.anchor_tail > 0) & (tokens.partition.policy_tail == 0)).any(), "the case this is about"
    found = divergences.topk_kl(tokens.partition, tokens.log_policy, tokens.log_anchor).lower
    b, p = b.double(), p.double()
    assert (found <= (b.exp() * (b - p)).sum(-1) + 1e-5).all()


def test_sampled_estimators_are_what_they_say():
    """k1 and k3 average to KL(b‖π) over b; k2 does not."""
    b = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    log_ratio = p.log() - b.log()
    exact = float((b * (b.log() - p.log())).sum())
    assert float((b * divergences.k1(log_ratio)).sum()) == pytest.approx(exact, abs=1e-15)
    assert float((b * divergences.k3(log_ratio)).sum()) == pytest.approx(exact, abs=1e-15)
    assert abs(float((b * divergences.k2(log_ratio)).sum()) - exact) > 0.01


def test_the_ratio_bounds_no_divergence():
    """A rare token may grow a hundredfold and move the policy by a percent."""
    rare = torch.tensor(1e-4).log(), torch.tensor(1e-2).log()
    assert float(divergences.ratio_gap(rare[1], rare[0]).lower) == pytest.approx(99.0, rel=1e-5)
    assert float(divergences.binary_tv(rare[1], rare[0]).lower) < 0.01


def test_symmetric_binary_kl_is_the_larger_direction():
    b, p = torch.tensor(0.9).double().log(), torch.tensor(0.3).double().log()
    both = [float(divergences.binary_kl(x, y).lower) for x, y in ((p, b), (b, p))]
    assert float(divergences.symmetric_binary_kl(p, b).lower) == max(both)
    assert both[0] != both[1]
