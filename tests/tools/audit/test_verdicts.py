"""Replayed verdicts are the engine's bit for bit; bounds hold against the truth over the whole vocabulary."""

import pytest

pytest.importorskip("pyarrow")

import torch

import trustrl
from support import recorded
from trustrl import regions
from trustrl.core.policy_loss import policy_loss
from trustrl.recording import Piece
from trustrl.tools.audit import TokenCounts, arm
from trustrl.tools.audit.region_replay import Replay
from trustrl.tools.audit.token_counts import REPRODUCED

REPLAYED = [name for name in trustrl.presets() if arm(name, trustrl.preset(name)).how == "replayed"]
MORE = {
    "cppo-binary": regions.CPPO(regions.BinaryTV(max_increase=0.05)),
    "ppo-dual": regions.PPO(dual_clip=1.5, max_ratio=1.2),
    "mis-sequence": regions.PPO(
        anchor="proximal", correction=regions.MIS(min_ratio=0.9, max_ratio=1.1, level="sequence-mean")
    ),
}


@pytest.mark.parametrize("name", [*REPLAYED, *MORE])
def test_the_recorded_region_asked_again_says_what_was_recorded(name, tmp_path):
    region = MORE.get(name) or trustrl.preset(name)
    recorded.record(tmp_path, region, at={(0, 0): float("nan"), (1, 0): -torch.inf, (2, 0): 1.0})
    for rows in (40, 10_000):
        found = [
            dict(zip(REPRODUCED, TokenCounts.of(p, []).counts["reproduced"].tolist(), strict=True))
            for p in recorded.pieces(tmp_path, rows)
        ]
        assert sum(one["rows"] for one in found) == sum(one["weight_rows"] for one in found) > 100
        assert not any(one["kept_differs"] or one["weight_differs"] for one in found)


def test_a_changed_verdict_and_a_changed_weight_are_noticed(tmp_path):
    (piece,) = recorded.pieces(recorded.record(tmp_path))
    kept, weight = piece.columns["kept"].clone(), piece.columns["weight"].clone()
    kept[3], weight[5] = ~kept[3], weight[5] + 1e-6
    changed = Piece({**piece.columns, "kept": kept, "weight": weight}, piece.run, piece.region)
    assert TokenCounts.of(changed, []).counts["reproduced"].tolist() == [len(piece), 1, len(piece), 1]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("dppo-topk-tv", "bounded", id="a top-K divergence is at least its binary one"),
        pytest.param("dppo-full-kl", "bounded", id="a full divergence too"),
        pytest.param("troll", "left out", id="a projection needs the distribution"),
        pytest.param("trm", "left out", id="a top-K verdict on sequences"),
        pytest.param("cppo", "left out", id="a top-K budget"),
        pytest.param("gspo", "replayed", id="a ratio of sequences"),
    ],
)
def test_what_can_be_said_is_said_before_reading(name, how):
    found = arm(name, trustrl.preset(name))
    assert found.how == how
    assert bool(found.reason) == (how != "replayed")


def test_a_missing_anchor_leaves_a_region_out(tmp_path):
    (piece,) = recorded.pieces(recorded.record(tmp_path, proximal=False))
    minirl, ppo = (arm(name, trustrl.preset(name)) for name in ("minirl", "ppo"))
    assert Replay(piece).missing(minirl.region) == ["proximal_logp"]
    assert Replay(piece).verdict(minirl) is None
    assert Replay(piece).verdict(ppo) is not None


@pytest.mark.parametrize("when", ["drop", "tighten"])
def test_a_region_that_reads_ages_is_replayed_if_versions_are_recorded(when, tmp_path):
    region = regions.DPPO(regions.BinaryTV(max_increase=0.05), max_staleness=1, when_stale=when)
    (piece,) = recorded.pieces(recorded.record(tmp_path))
    given = arm("aged", region)
    assert given.how == "replayed"
    assert Replay(piece).missing(region) == ["sampler_version"]
    assert Replay(piece).verdict(given) is None

    version = piece.columns["step"] - torch.arange(len(piece)) % 4
    aged = Piece({**piece.columns, "sampler_version": version}, piece.run, piece.region)
    found, plain = (Replay(aged).verdict(arm("one", one)).masked for one in (region, regions.DPPO(region.divergence)))
    old = (torch.arange(len(piece)) % 4 > 1) & (aged.columns["advantage"] != 0)
    assert torch.equal(found[~old], plain[~old])
    assert found[old].all() if when == "drop" else (found > plain)[old].any()
    assert (found >= plain).all()
    assert arm("top-K", trustrl.preset("dppo-topk-tv", max_staleness=1)).how == "left out"


# ── against the whole vocabulary ────────────────────────────────────────────────────────────────────────────────────

ANCHOR, POLICY, TOKEN, ADVANTAGE = recorded.worlds()
BOUND = 0.12


def statistic(kind, k=0, **more):
    family = {
        "tv": (regions.BinaryTV, regions.TopKTV, regions.FullTV),
        "kl": (regions.BinaryKL, regions.TopKKL, regions.FullKL),
    }
    binary, topk, full = family[kind]
    more = {"max_increase": BOUND, **more}
    return full(**more) if k == 12 else topk(k=k, **more) if k else binary(**more)


def decided(region):
    """The region's verdict with the whole vocabulary at hand, and the piece a record of it would be."""
    k = region.needs().topk or 1
    top = ANCHOR.topk(k, dim=-1)
    rollout = trustrl.RolloutTokens(
        advantage=ADVANTAGE, in_loss=torch.ones(len(ADVANTAGE), dtype=torch.bool),
        behavior_logp=ANCHOR.gather(-1, TOKEN).squeeze(-1), token_ids=TOKEN.squeeze(-1),
        topk=trustrl.TopK(top.indices, top.values), full=trustrl.FullVocabulary(ANCHOR),
        sequence_ids=torch.arange(len(ADVANTAGE)),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(
        logp=POLICY.gather(-1, TOKEN).squeeze(-1), topk_logp=POLICY.gather(-1, top.indices), full_logp=POLICY
    )
    decision = policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).decision
    columns = {
        "policy_logp": policy.logp, "behavior_logp": rollout.behavior_logp, "advantage": ADVANTAGE,
        "kept": decision.keep, "weight": decision.weight.float(),
        "divergence_lower": decision.divergence.lower.float(), "divergence_upper": decision.divergence.upper.float(),
    }  # fmt: skip
    return ~decision.keep, Piece(columns, torch.arange(len(ADVANTAGE)), trustrl.config_to_dict(region))


@pytest.mark.parametrize("direction", ["away", "symmetric"])
@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("recorded_k", [0, 2, 4, 12])
@pytest.mark.parametrize("asked_k", [2, 4, 12])
def test_bounds_hold_against_the_whole_vocabulary(kind, recorded_k, asked_k, direction):
    _, piece = decided(regions.DPPO(statistic(kind, recorded_k)))
    region = regions.TrustRegion(statistic(kind, asked_k), direction=direction)
    truth, _ = decided(region)
    found = Replay(piece).verdict(arm("asked", region))
    assert not (found.masked & ~truth).any()
    assert not (truth & ~found.may_mask).any()
    assert 0.03 < truth.float().mean() < 0.97
    if asked_k == recorded_k:  # the record holds this very divergence
        assert torch.equal(found.masked, found.may_mask)


@pytest.mark.parametrize("recorded_k", [0, 4, 12])
def test_bounds_of_a_cautious_region_hold_too(recorded_k):
    _, piece = decided(regions.DPPO(statistic("tv", recorded_k)))
    for k in (2, 4):
        region = regions.DPPO(statistic("tv", k, act_on="upper"))
        truth, _ = decided(region)
        found = Replay(piece).verdict(arm("asked", region))
        assert not (found.masked & ~truth).any()
        assert not (truth & ~found.may_mask).any()


@pytest.mark.parametrize("recorded_k", [0, 2, 12])
def test_certificates_hold_and_a_recorded_top_k_narrows_them(recorded_k):
    tv = 0.5 * (ANCHOR.double().exp() - POLICY.double().exp()).abs().sum(-1)
    undecided = []
    for k in (0, recorded_k):
        _, piece = decided(regions.DPPO(statistic("tv", k)))
        outside, inside = Replay(piece).verdict(arm("binary", regions.DPPO(statistic("tv")))).certified
        assert not (outside & (tv <= BOUND)).any()
        assert not (inside & (tv > BOUND)).any()
        undecided.append(int((~outside & ~inside).sum()))
    assert undecided[1] < undecided[0] if recorded_k else undecided[1] == undecided[0] > 0
