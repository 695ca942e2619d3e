"""Metrics against plain formulas, histograms against exact quantiles, and the dictionary that defines them."""

import math

import numpy as np
import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl import regions
from trustrl.core.diagnostics import Sums, bin_of, histogram
from trustrl.core.metrics import METRICS
from trustrl.core.sum_table import HALF, NUM_BINS, quantile


@pytest.fixture(scope="module")
def measured():
    """A DPPO Top-K batch with everything recorded, and its numbers in plain numpy."""
    w = world(1, rows=12, width=24, drift=0.5, mismatch=0.2)
    rollout = w.rollout(version=torch.arange(288).reshape(12, 24) % 20)
    policy = w.policy_tokens(rollout)
    policy = trustrl.PolicyTokens(logp=policy.logp, topk_logp=policy.topk_logp, entropy=policy.entropy, version=20)
    region = regions.DPPO(regions.TopKTV(), max_ratio=1.5)
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenMean(num_tokens=w.num_tokens))
    m = w.in_loss.numpy()
    b, p, k = (w.at_token(x).exp().numpy()[m] for x in (w.behavior, w.policy, w.proximal))
    values = {
        "A": w.advantage.numpy()[m], "b": b, "p": p, "r": p / b, "k": k / b, "keep": out.decision.keep.numpy()[m],
        "D": out.decision.divergence.lower.numpy()[m], "U": out.decision.divergence.upper.numpy()[m],
        "H": policy.entropy.numpy()[m], "age": (20 - rollout.version.numpy())[m],
    }  # fmt: skip
    return trustrl.rates(out.sums), values, out


def test_every_metric_equals_its_plain_formula(measured):
    rates, v, out = measured
    gap, logr = v["p"] - v["b"], np.log(v["r"])
    signed, stopped = v["A"] != 0, ~v["keep"]
    n = len(gap)
    ends = v["D"], v["U"]
    want = {
        "masked_share": stopped.sum() / signed.sum(),
        "masked_share_increase": (stopped & (gap > 0)).sum() / signed.sum(),
        "masked_share_decrease": (stopped & (gap < 0)).sum() / signed.sum(),
        "bad_update_share": ((v["A"] < 0) & (gap <= -0.5)).mean(),
        "gap_mean": gap.mean(), "gap_abs_mean": np.abs(gap).mean(), "gap_min": gap.min(), "gap_max": gap.max(),
        "ratio_mean": v["r"].mean(), "ratio_max": v["r"].max(),
        "weight_mean": np.minimum(v["r"], 1.5)[v["keep"]].mean(), "capped_share": (v["r"] > 1.5).mean(),
        "kl_k1": -logr.mean(), "kl_k2": 0.5 * (logr**2).mean(), "kl_k3": (v["r"] - 1 - logr).mean(),
        "effective_sample_share": v["r"].sum() ** 2 / (n * (v["r"] ** 2).sum()), "chi_square": (v["r"] ** 2).mean() - 1,
        "divergence_mean": ends[0].mean(), "divergence_max": ends[0].max(), "divergence_infinite": 0,
        "divergence_upper_mean": ends[1].mean(), "undecided_share": ((ends[0] <= 0.15) & (ends[1] > 0.15)).mean(),
        "entropy": v["H"].mean(), "entropy_stopped": v["H"][stopped].mean(), "entropy_kept": v["H"][~stopped].mean(),
        "mismatch_abs_mean": np.abs(np.log(v["k"])).mean(), "mismatch_max": np.log(v["k"]).max(),
        "mismatch_gap_abs_mean": np.abs(v["b"] * v["k"] - v["b"]).mean(), "masked_probability_mean": v["b"][stopped].mean(),
        "mismatch_min": np.log(v["k"]).min(), "mismatch_ratio_mean": v["k"].mean(),
        "tokens": n, "sequences": 12, "dropped_share": 0.0, "loss_policy": out.loss.item(),
    }  # fmt: skip
    for name, value in want.items():
        assert rates[f"trustrl/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_bins_partition_the_tokens(measured):
    rates, v, _ = measured
    edges = [0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 2]
    names = ["below_0.0001", *(f"from_{e:g}" for e in edges[1:-1])]
    seen = 0
    for low, high, name in zip(edges, edges[1:], names, strict=False):
        inside = (v["b"] >= low) & (v["b"] < high)
        seen += inside.sum()
        key = f"trustrl/masked_share_probability_{name}"
        if inside.any():
            assert rates[key] == pytest.approx((~v["keep"])[inside].mean())
            moved = np.abs(v["p"] - v["b"])[inside].mean()
            assert rates[f"trustrl/gap_abs_mean_probability_{name}"] == pytest.approx(moved)
        else:
            assert key not in rates
    assert seen == len(v["b"])
    for low, high, name in [(1, 2, "from_1"), (3, 5, "from_3"), (17, 99, "from_17")]:
        inside = (v["age"] >= low) & (v["age"] < high)
        assert rates[f"trustrl/masked_share_staleness_{name}"] == pytest.approx((~v["keep"])[inside].mean())
    assert "trustrl/masked_share_staleness_below_1" not in rates  # nothing is fresh in this batch


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [1e-4, 0.1, 30.0])
def test_histogram_quantiles_are_right_to_one_bin(share, scale):
    g = torch.Generator().manual_seed(0)
    x = scale * torch.randn(20_000, generator=g, dtype=torch.float64)
    estimate = quantile(histogram(x, torch.ones_like(x)).tolist(), share)
    exact = float(x.quantile(share))
    assert abs(estimate - exact) <= 0.125 * abs(exact) + 0.03 * scale


def test_bins_are_ordered_like_numbers():
    x = torch.tensor(
        [-math.inf, -1e3, -1.0, -1e-3, -1e-8, -0.0, 0.0, 1e-9, 1e-8, 1e-3, 1.0, 1.12, 1.13, 1e3, math.inf],
        dtype=torch.float64,
    )
    bins = bin_of(x).tolist()
    assert bins == sorted(bins)
    assert bins[0] == 0
    assert bins[-1] == NUM_BINS - 1
    assert bins[5] == bins[6] == bins[7] == HALF
    assert bins[8] > HALF
    assert bins[10] == bins[11] < bins[12]
    assert min(bins) >= 0
    assert max(bins) < NUM_BINS


def test_quantiles_of_reported_histograms(measured):
    rates, v, _ = measured
    for share in (0.5, 0.9, 0.99):
        exact = np.quantile(v["D"], share)
        assert rates[f"trustrl/divergence_p{round(share * 100)}"] == pytest.approx(exact, rel=0.2)
    assert rates["trustrl/divergence_upper_p50"] >= rates["trustrl/divergence_p50"]
    assert rates["trustrl/gap_p01"] < 0 < rates["trustrl/gap_p99"]


def test_sums_stay_exact_past_16_million_tokens():
    """float32 counts stop at 2²⁴; ours are float64."""
    w = world(0)
    out, _ = run("ppo", w, dtype=torch.float32)
    assert all(x.dtype == torch.float64 for x in out.sums.added.values())
    many = Sums({k: x * 1e7 for k, x in out.sums.added.items()}, out.sums.highest)
    one_more = many + out.sums
    assert trustrl.rates(one_more)["trustrl/tokens"] == w.num_tokens * (10**7 + 1)


def test_sequence_regions_count_by_the_sequences_direction():
    """Both tokens of a sequence that rose as a whole are stopped upwards, the one that fell included."""
    logp = torch.tensor([[0.9, 0.45]], dtype=torch.float64).log()
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[0.5, 0.5]], dtype=torch.float64).log(), advantage=torch.ones(1), in_loss=torch.ones(1, 2).bool()
    )  # fmt: skip
    out = trustrl.policy_loss(
        trustrl.PolicyTokens(logp=logp),
        rollout,
        regions.GSPO(),
        reduction=trustrl.SequenceMeanTokenMean(num_sequences=1),
    )
    rates = trustrl.rates(out.sums)
    assert rates["trustrl/masked_share"] == rates["trustrl/masked_share_increase"] == 1.0
    assert rates["trustrl/masked_share_decrease"] == 0.0


def test_a_point_sends_no_second_histogram():
    w = world(0)
    for name in ("dppo-full-tv", "ppo", "trm-sampled"):
        assert "histogram/divergence_upper" not in run(name, w)[0].sums.added
    assert "histogram/divergence_upper" in run("dppo-topk-tv", w)[0].sums.added


def test_a_mismatch_that_is_a_fault_is_left_out_of_its_mean():
    w = world(0)
    rollout = w.rollout()
    broken = rollout.proximal_logp.clone()
    broken[w.in_loss.nonzero()[0][0], w.in_loss.nonzero()[0][1]] = 5.0
    out, _ = run("dppo-binary-tv", w, proximal_logp=broken)
    rates = trustrl.rates(out.sums)
    assert rates["trustrl/dropped_share"] == 0.0
    assert 0.5 < rates["trustrl/mismatch_ratio_mean"] < 2
    assert rates["trustrl/mismatch_max"] < 3


def test_a_mismatch_nobody_knows_has_no_extremes():
    w = world(0)
    out, _ = run("dppo-binary-tv", w, proximal_logp=torch.full((4, 16), torch.nan, dtype=torch.float64))
    assert not [name for name in trustrl.rates(out.sums) if "mismatch" in name]


def test_the_dictionary_is_complete():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        for text in (metric.formula, metric.unit, metric.direction, metric.healthy, metric.action):
            assert text.strip(), metric.name
    engines = {engine for metric in METRICS for engine in metric.elsewhere}
    assert engines == {"verl", "trl", "skyrl", "openrlhf", "prime-rl"}


def test_every_reported_number_is_in_the_dictionary():
    known = {f"trustrl/{m.name}" for m in METRICS}
    for name in trustrl.presets():
        w = world(0, vocabulary=70)
        out, _ = run(name, w)
        assert set(trustrl.rates(out.sums)) <= known, name


def test_sums_are_made_once_and_only_when_asked_for(monkeypatch):
    from trustrl.core.impl import eager

    calls, collect = [], eager.collect
    monkeypatch.setattr(eager, "collect", lambda *args: calls.append(1) or collect(*args))
    out, _ = run("dppo-binary-tv", world(0))
    assert calls == []
    assert out.sums is out.sums
    assert calls == [1]


def test_merge_of_nothing_is_refused():
    with pytest.raises(trustrl.errors.RecordError, match="at least one"):
        trustrl.merge([])
