"""Noise, thresholds and confidence: against plain Python and scipy."""

import math

import pytest

pytest.importorskip("pyarrow")
scipy = pytest.importorskip("scipy")

import torch
from hypothesis import given, settings, strategies as st

from support import recorded
from trustrl.errors import MissingDataError
from trustrl.tools.calibrate.calibration import (
    calibration,
    curves,
    draw,
    num_above,
    num_needed,
    rank_above,
    text,
    value_at,
)
from trustrl.tools.calibrate.noise_counts import GRID, noise_of


@given(
    num=st.integers(1, 200_000),
    quantile=st.sampled_from([0.5, 0.9, 0.99, 0.999]),
    confidence=st.sampled_from([0.9, 0.95, 0.99]),
)
@settings(max_examples=60, deadline=None)
def test_the_order_statistic_is_the_smallest_that_covers(num, quantile, confidence):
    """P(X_(k) < quantile) ≤ P(Binomial(n, q) ≥ k), for any distribution."""
    rank = rank_above(num, quantile, confidence)

    def misses(k):
        return scipy.stats.binom.sf(k - 1, num, quantile)

    if rank is None:
        assert misses(num) > 1 - confidence - 1e-9
        assert num < num_needed(quantile, confidence)
    else:
        assert misses(rank) <= 1 - confidence + 1e-9
        assert rank == 1 or misses(rank - 1) > 1 - confidence - 1e-9


def test_a_hundred_million_tokens_need_no_loop_over_them():
    assert rank_above(10**8) == 10**8 - int(scipy.stats.binom.ppf(0.05, 10**8, 0.001)) + 1


@given(values=st.lists(st.floats(0, 500), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_counts_on_the_grid_are_exact_and_values_are_rounded_up_to_two_digits(values, data):
    place = torch.bucketize(torch.tensor(values, dtype=torch.float64), torch.tensor(GRID, dtype=torch.float64))
    bins = torch.bincount(place, minlength=len(GRID) + 1).tolist()
    delta = data.draw(st.sampled_from(GRID))
    assert num_above(bins, delta) == sum(x > delta for x in values)
    rank = data.draw(st.integers(1, len(values)))
    true, told = sorted(values)[rank - 1], value_at(bins, rank)
    assert true <= told <= max(1.1 * true, GRID[0])


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return recorded.record(tmp_path_factory.mktemp("records"), seeds=range(3), proximal=False, noise=0.05, moved=1.5)


def test_curves_are_what_plain_python_counts(noisy):
    (piece,) = recorded.pieces(noisy)
    rows, summary = recorded.columns(noisy), noise_of(piece)
    tokens = list(zip(*(rows[n] for n in ("policy_logp", "behavior_logp", "advantage", "update")), strict=True))
    gap = [(math.exp(p) - math.exp(b), a, u) for p, b, a, u in tokens]
    bad = [x for x, a, _ in gap if a < 0 and x <= -0.5]
    assert bad
    first = [abs(x) for x, _, u in gap if u == 0]
    for delta in (0.002, 0.15, 0.6):
        (found,) = curves(summary, "tv", [delta])
        assert found["masked"] == sum(x * a > 0 and abs(x) > delta for x, a, _ in gap) / len(gap)
        assert found["noise"] == sum(x > delta for x in first) / len(first)
        assert found["bad_left"] == sum(-x <= delta for x in bad) / len(gap)
        ends = [(abs(math.exp(p) - math.exp(b)), 1 - math.exp(min(p, b))) for p, b, _, _ in tokens]
        assert found["certified"] == sum(low > delta or high <= delta for low, high in ends) / len(gap)
        ratio = [math.exp(p - b) - 1 for p, b, _, _ in tokens]
        (clip,) = curves(summary, "ratio", [delta])
        assert clip["masked"] == sum(
            r * a > 0 and abs(r) > delta for r, (_, _, a, _) in zip(ratio, tokens, strict=True)
        ) / len(gap)
        assert clip["certified"] is None
    found = calibration(summary)
    assert found["against"] == "policy"
    assert found["bad_update_share"] == len(bad) / len(gap)
    apart = sorted(abs(p - b) for p, b, _, u in tokens if u == 0)
    half = apart[math.ceil(len(apart) / 2) - 1]
    assert half <= found["quantiles"]["logp"]["0.5"] <= 1.1 * half


def test_too_few_tokens_get_no_recommendation_and_are_told_how_many(noisy):
    (piece,) = recorded.pieces(noisy)
    found = calibration(noise_of(piece))
    assert found["noise"] < found["needed"] == 2995
    for one in found["statistics"].values():
        assert one["recommended"] is one["floor"] is None
        assert "2,995" in one["reason"]
        assert f"{found['noise']:,}" in one["reason"]


def much(noise, **more):
    """Noise of one size at many tokens."""
    from trustrl.recording import Piece

    num = more.pop("num", 4000)
    draw = torch.Generator().manual_seed(0)
    behavior = torch.full((num,), math.log(0.5))
    columns = {
        "behavior_logp": behavior, "policy_logp": behavior + noise, "advantage": torch.randn(num, generator=draw),
        "update": torch.zeros(num, dtype=torch.int32), "step": torch.zeros(num, dtype=torch.int32), **more,
    }  # fmt: skip
    return Piece(columns, torch.arange(num), {})


def test_small_noise_leaves_the_published_threshold():
    found = calibration(noise_of(much(0.001)))["statistics"]["tv"]
    assert (found["floor"], found["recommended"]) == (0.00051, 0.15)  # 0.5 × (e^0.001 − 1), rounded up
    assert "does not mask it" in found["reason"]


def test_large_noise_raises_the_threshold_to_its_bound():
    found = calibration(noise_of(much(0.5)))
    tv = found["statistics"]["tv"]
    assert tv["floor"] == tv["recommended"] == 0.33  # 0.5 × (e^0.5 − 1) = 0.324
    assert "would mask noise" in tv["reason"]
    assert "recommended δ: 0.33" in text(found)


def test_rounding_to_certainty_is_no_noise():
    """μ = 1 − 1e-6 and π' = 1 in float32: nothing has moved, and taken literally KL(μ‖π') is infinite."""
    certain = torch.full((4000,), -1e-6)
    found = calibration(noise_of(much(0.0, behavior_logp=certain, policy_logp=torch.zeros(4000))))
    kl, tv = found["statistics"]["kl"], found["statistics"]["tv"]
    assert (kl["infinite"], kl["recommended"], tv["infinite"], tv["recommended"]) == (0.0, 0.05, 0.0, 0.15)
    assert kl["floor"] < 1e-5


def test_no_threshold_leaves_endless_noise_alone():
    """The sampler calls certain what the trainer calls impossible; a TV and a KL have an end, a ratio has none."""
    impossible = torch.full((4000,), -800.0)
    found = calibration(noise_of(much(0.0, behavior_logp=impossible, policy_logp=torch.zeros(4000))))
    ratio, tv = found["statistics"]["ratio"], found["statistics"]["tv"]
    assert (ratio["infinite"], ratio["recommended"], tv["infinite"]) == (1.0, None, 0.0)
    assert "the noise is infinite at 100% of tokens" in ratio["reason"]
    assert "inf" in text(found)


def test_noise_is_against_the_recorded_proximal_policy_before_the_first_update():
    num = 4000
    update = torch.arange(num, dtype=torch.int32) % 2
    proximal = torch.full((num,), math.log(0.5)) + 0.01 * (1 + 9 * update)
    found = calibration(noise_of(much(0.3, proximal_logp=proximal, update=update)))
    assert found["against"] == "proximal"
    assert found["noise"] == num // 2
    assert found["quantiles"]["logp"]["1"] in (0.01, 0.011)  # with rounding; not the 0.1 of later updates


def test_without_the_samplers_side_there_is_no_noise_to_measure():
    piece = much(0.1)
    del piece.columns["behavior_logp"]
    with pytest.raises(MissingDataError, match="behavior_logp"):
        calibration(noise_of(piece))


def test_text_fits_a_terminal_and_the_picture_is_drawn(noisy, tmp_path):
    pytest.importorskip("matplotlib")
    (piece,) = recorded.pieces(noisy)
    summary = noise_of(piece)
    found = calibration(summary)
    assert max(map(len, text(found).splitlines())) <= 100
    draw(summary, found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
