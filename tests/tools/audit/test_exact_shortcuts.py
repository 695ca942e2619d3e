"""Shared measurements and joint histograms give the verdicts and counts of the engine's own functions, token by token."""

import math

import pytest

pytest.importorskip("pyarrow")

import torch
from hypothesis import given, settings, strategies as st

import trustrl
from trustrl import regions
from trustrl.config.axes import Needs
from trustrl.core.clean import clean_tokens
from trustrl.core.decision import decide
from trustrl.core.divergences import acting_end, measure
from trustrl.recording import Piece
from trustrl.tools.audit import TokenCounts, arm
from trustrl.tools.audit.anchored_tokens import AnchoredTokens
from trustrl.tools.audit.region_replay import Replay
from trustrl.tools.audit.token_counts import BINS, PER_ARM, TokenSets

ODD = (math.nan, -math.inf, math.inf, 0.0, -0.0, 1e-3, 1.1e-3, -1e-30, -1e-7, -200.0, -3e38)
LENGTH = 120


def piece_of(seed, faults):
    """Random tokens, some equal to the anchor, some at edges, some faulty; sequences of 1 to 8 tokens."""
    draw = torch.Generator().manual_seed(seed)

    def uniform():
        return torch.rand(LENGTH, generator=draw)

    behavior = -(uniform() ** 4) * 12
    policy = (behavior + (uniform() - 0.5) * 10 ** (3 * uniform() - 2)).clamp(max=0.0)
    policy[uniform() < 0.1] = behavior[uniform() < 0.1].mean() if faults else 0.0
    same = uniform() < 0.1
    policy[same] = behavior[same]
    advantage = torch.randn(LENGTH, generator=draw)
    advantage[uniform() < 0.2] = 0.0
    columns = {"policy_logp": policy, "behavior_logp": behavior, "proximal_logp": behavior + 0.01 * (uniform() - 1)}
    if faults:
        for x in (*columns.values(), advantage):
            at = torch.randint(LENGTH, (5,), generator=draw)
            x[at] = torch.tensor(ODD)[torch.randint(len(ODD), (5,), generator=draw)]
    step = torch.randint(0, 5, (LENGTH,), generator=draw, dtype=torch.int32)
    columns |= {
        "advantage": advantage, "kept": uniform() < 0.7, "weight": uniform(), "step": step,
        "update": torch.randint(0, 3, (LENGTH,), generator=draw, dtype=torch.int32),
        "sampler_version": step - torch.randint(-1, 20, (LENGTH,), generator=draw, dtype=torch.int32),
        "position": torch.randint(0, 2**18, (LENGTH,), generator=draw, dtype=torch.int32) >> (step * 3),
        "token_id": torch.randint(-1, 9, (LENGTH,), generator=draw, dtype=torch.int32),
    }  # fmt: skip
    run = (uniform() < 0.3).long().cumsum(0)
    return Piece(columns, run - run[0], {})


def engine(piece, region):
    """The library's clean tokens and decision."""
    columns = piece.columns
    rollout = trustrl.RolloutTokens(
        advantage=columns["advantage"], in_loss=torch.ones(len(piece), dtype=torch.bool), sequence_ids=piece.run,
        behavior_logp=columns["behavior_logp"], proximal_logp=columns["proximal_logp"],
    )  # fmt: skip
    needs = region.needs()
    reads = Needs(anchors=needs.anchors, anchor=needs.anchor, sequences=True)
    tokens = clean_tokens(trustrl.PolicyTokens(logp=columns["policy_logp"]), rollout, reads)
    return tokens, decide(tokens, region)


def regions_at(low, high, anchor):
    """Every rule that does not call `decide`, with these bounds."""
    bounds = {"max_decrease": low, "max_increase": high}
    probability = {name: min(x, 1.0) for name, x in bounds.items()}
    tv, kl, ratio = regions.BinaryTV(**probability), regions.BinaryKL(**bounds), regions.Ratio(**bounds)
    return [
        regions.DPPO(tv, anchor=anchor),
        regions.DPPO(regions.BinaryTV(**probability, act_on="upper"), anchor=anchor),
        regions.DPPO(kl, anchor=anchor, max_ratio=1.5),
        regions.PPO(ratio, anchor=anchor, action="clip"),
        regions.TrustRegion(ratio, anchor=anchor, direction="symmetric"),
        regions.TrustRegion(tv, anchor=anchor, direction="symmetric"),
        regions.TrustRegion(kl, anchor=anchor, direction="symmetric", max_ratio=2.0),
        regions.TrustRegion(regions.BinaryTV(**probability, act_on="upper"), anchor=anchor, direction="symmetric"),
        regions.TrustRegion(regions.SequenceRatio(**bounds), anchor=anchor, level="sequence"),
        regions.PPO(ratio, anchor="proximal", correction=regions.TIS(max_ratio=1.001)),
        regions.IPO(regions.BinaryTV(max_increase=probability["max_increase"]), anchor=anchor),
    ]


def bounds_of(piece, region, seed):
    """Two bounds that equal some token's own distance, or lie one float64 below it."""
    tokens, _ = engine(piece, region)
    axes = region if isinstance(region, regions.TrustRegion) else region.axes()
    distance = acting_end(measure(tokens, axes.statistic), axes.statistic)
    distance = distance[(distance > 1e-12) & (distance <= 1)]
    draw = torch.Generator().manual_seed(seed)
    picked = distance[torch.randint(len(distance), (2,), generator=draw)].tolist()
    return [x if torch.rand((), generator=draw) < 0.5 else math.nextafter(x, 0.0) for x in picked]


@given(seed=st.integers(0, 10**6), faults=st.booleans(), which=st.integers(0, 10))
@settings(max_examples=150, deadline=None)
def test_verdicts_and_weights_are_the_engines_at_any_bound_and_with_any_fault(seed, faults, which):
    piece = piece_of(seed, faults)
    anchor = ("behavior", "proximal")[seed % 2]
    low, high = bounds_of(piece, regions_at(0.1, 0.2, anchor)[which], seed)
    region = regions_at(low, high, anchor)[which]
    given_arm = arm("one", region)
    assert given_arm.plain is not None
    tokens, decision = engine(piece, region)
    found = Replay(piece).verdict(given_arm)
    assert torch.equal(found.measured, tokens.usable)
    assert torch.equal(found.masked, ~decision.keep)
    torch.testing.assert_close(found.weight(), decision.weight, rtol=0, atol=0, equal_nan=True)


@given(seed=st.integers(0, 10**6), bound=st.floats(1e-14, 5.0))
@settings(max_examples=100, deadline=None)
def test_a_kl_above_its_bound_is_found_without_computing_every_kl(seed, bound):
    piece = piece_of(seed, faults=True)
    region = regions.DPPO(regions.BinaryKL())
    tokens, _ = engine(piece, region)
    exact = measure(tokens, regions.BinaryKL())
    shared = AnchoredTokens(piece.columns, piece.run, region.needs())
    for limit in (bound, *exact.lower[(exact.lower > 0) & (exact.lower < math.inf)][:5].tolist(), math.inf):
        assert torch.equal(shared.above("kl", "lower", limit), exact.lower > limit)
        assert torch.equal(shared.above("kl", "upper", limit), exact.upper > limit)


@pytest.mark.parametrize("num", [1, 7, 9, 12, 14])
@pytest.mark.parametrize("bins", [3, 5000])
def test_sets_are_counted_as_one_by_one(num, bins):
    draw = torch.Generator().manual_seed(num)
    sets = [torch.rand(1000, generator=draw) < 0.3 for _ in range(num)]
    place = torch.randint(bins, (1000,), generator=draw, dtype=torch.int32)
    found = TokenSets(sets)
    assert found.overlaps().tolist() == [[int((a & b).sum()) for b in sets] for a in sets]
    assert torch.equal(found.by_bin(place, bins), torch.stack([torch.bincount(place[a], minlength=bins) for a in sets]))


ARMS = [arm(name, trustrl.preset(name)) for name in ("ppo", "gspo", "ipo", "dppo-binary-kl", "dppo-topk-tv", "troll")]


@given(seed=st.integers(0, 10**6), faults=st.booleans())
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_plain_loops_over_the_engines_verdicts(seed, faults):
    piece = piece_of(seed, faults)
    columns, counts = piece.columns, TokenCounts.of(piece, ARMS).counts
    policy, advantage = columns["policy_logp"], columns["advantage"]
    signed = (policy > -math.inf) & (policy <= 1e-3) & advantage.isfinite() & (advantage != 0)
    masks = [~columns["kept"], *(None for _ in ARMS)]
    for at, one in enumerate(ARMS[:4], start=1):
        tokens, decision = engine(piece, one.region)
        masks[at] = ~decision.keep
        row = dict(zip(PER_ARM, counts["arms"][at].tolist(), strict=True))
        assert (row["rows"], row["measured"]) == (len(piece), int(tokens.usable.sum()))
        assert row["signed"] == int((tokens.usable & signed).sum())
        assert row["stopped"] == row["stopped_at_most"] == int((masks[at] & signed).sum())
    assert int(counts["signed"]) == int(signed.sum())
    ages = (columns["step"] - columns["sampler_version"]).clamp(min=0) + columns["update"]
    values = {
        "position": columns["position"], "age": ages, "advantage": advantage,
        "probability": columns["behavior_logp"].double().exp().nan_to_num(0.0),
    }  # fmt: skip
    known = columns["token_id"] >= 0
    for at, mask in enumerate(masks[:5]):
        stopped = mask & signed
        for other, second in enumerate(masks[:5]):
            assert counts["pairs"][:, at, other].tolist() == [
                int(signed.sum()), int(stopped.sum()), int((stopped & second).sum())
            ]  # fmt: skip
        for name, x in values.items():
            place = torch.bucketize(x.double(), torch.tensor(BINS[name], dtype=torch.float64), right=True)
            for row, here in enumerate((signed, stopped)):
                expected = torch.bincount(place[here], minlength=len(BINS[name]) + 1)
                assert torch.equal(counts[f"by/{name}"][row, at], expected), name
        ids = torch.bincount(columns["token_id"][stopped & known].long(), minlength=16)
        assert torch.equal(counts["ids"][at + 1], ids)
    assert torch.equal(counts["ids"][0], torch.bincount(columns["token_id"][signed & known].long(), minlength=16))
    assert not counts["arms"][6].any()
    assert not counts["pairs"][:, 6].any()
