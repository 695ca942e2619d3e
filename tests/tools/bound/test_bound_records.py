"""`trustrl bound` on records of every sequence of a small model, where its means are the exact expectations."""

import json
import math
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import bound_pairs as exact

import trustrl
from support import enumerated, recorded
from trustrl import regions
from trustrl.cli import main
from trustrl.recording import Piece
from trustrl.recording.record_files import part_files
from trustrl.tools.audit import Replay, count_records
from trustrl.tools.bound.bound_report import Threshold, bound_report, read_rewards, threshold
from trustrl.tools.bound.update_sums import COLUMNS, SUMS, Rewards, UpdateSums, sums_of

BINARY, FULL = trustrl.preset("dppo-binary-tv"), trustrl.preset("dppo-full-tv")
FAR = (0.0, 0.01, 0.1, 1.0)


@pytest.fixture(scope="module")
def updates():
    """μ once, and π further and further from it; every word's reward is its own."""
    rng = np.random.default_rng(5)
    first = enumerated.pair(rng, 0.0)
    direction = [rng.normal(size=p.shape) for p in first.behavior]

    def moved(far):
        policy = [p * np.exp(far * d) for p, d in zip(first.behavior, direction, strict=True)]
        return exact.Pairs(first.behavior, [q / q.sum(-1, keepdims=True) for q in policy])

    return [moved(far) for far in FAR], rng.uniform(-0.5, 2.0, enumerated.WORDS**enumerated.HORIZON)


def report(folder, capsys, *more):
    assert main(["bound", str(folder), "--json", *more]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


@pytest.mark.parametrize("region", [BINARY, FULL], ids=["binary", "full"])
def test_every_number_is_that_of_the_enumeration(region, updates, tmp_path, capsys):
    pairs, reward = updates
    found = report(enumerated.record(tmp_path, pairs, reward, region), capsys)
    assert found["horizon"] == enumerated.HORIZON
    assert found["xi"] == pytest.approx(np.abs(reward).max())
    assert len(found["updates"]) == len(FAR)
    for far, one, pair in zip(FAR, found["updates"], pairs, strict=True):
        want = exact.measured(pair, reward[None])
        by_max, by_sum = exact.penalties(want, enumerated.HORIZON, want.xi)
        at = one["published"]
        assert at["surrogate"] == pytest.approx(want.surrogate[0], abs=2e-6)
        assert one["sum_tv"] == pytest.approx(want.sum_tv[0], abs=2e-6)
        assert at["sum_form"] == pytest.approx(by_sum[0], abs=2e-5)
        assert one["max_tv"][0] <= want.max_tv[0] + 1e-6
        assert one["max_tv"][1] >= want.max_tv[0] - 1e-6
        assert at["max_form"] <= by_max[0] + 2e-5
        if region is FULL:
            assert one["max_tv"] == pytest.approx([want.max_tv[0]] * 2, abs=1e-6)
            assert one["sum_tv_bounds"] == pytest.approx([want.sum_tv[0]] * 2, abs=1e-6)
            assert at["max_form"] == pytest.approx(by_max[0], abs=2e-5)
            assert at["bound"] == pytest.approx(want.surrogate[0] - min(by_max[0], by_sum[0]), abs=2e-5)
            assert at["bound"] <= want.change[0] + 2e-6
        else:
            assert one["sum_tv_bounds"][0] <= want.sum_tv[0] + 1e-6
            assert one["sum_tv_bounds"][1] >= want.sum_tv[0] - 1e-6
        if far == 0:
            assert at["says"] == "unchanged"
    assert [one["published"]["says"] for one in found["updates"]][1] == "improves" or region is BINARY


def test_centered_rewards_change_no_expectation_and_have_the_smaller_penalty(updates, tmp_path, capsys):
    pairs, reward = updates
    found = report(enumerated.record(tmp_path, pairs, reward, FULL), capsys)
    half = (reward.max() - reward.min()) / 2
    assert found["half_range"] == pytest.approx(half)
    for one in found["updates"]:
        published, centered = one["published"], one["centered"]
        assert centered["surrogate"] == pytest.approx(published["surrogate"], abs=2e-6)
        for form in ("max_form", "sum_form"):
            assert centered[form] == pytest.approx(published[form] * half / found["xi"])


def test_the_error_is_the_standard_error_of_the_mean(updates, tmp_path, capsys):
    pairs, reward = updates
    found = report(enumerated.record(tmp_path, pairs, reward, BINARY), capsys)
    _, number = enumerated.enumerate_all(pairs[0])
    middle = (reward.max() + reward.min()) / 2
    for one, pair in zip(found["updates"], pairs, strict=True):
        _, _, ratios = exact.sequences_of(pair)
        gap = sum(ratio[0] - 1 for ratio in ratios)[number]
        for name, shift in (("published", 0.0), ("centered", middle)):
            drawn = (reward[number] - shift) * gap
            want = drawn.std(ddof=0) / math.sqrt(len(drawn) - 1)
            assert one[name]["surrogate_error"] == pytest.approx(want, abs=2e-6)


def test_the_share_inside_counts_upper_ends_at_most_delta(updates, tmp_path, capsys):
    pairs, reward = updates
    folder = enumerated.record(tmp_path, pairs, reward, FULL)
    words, number = enumerated.enumerate_all(pairs[0])
    for delta in (0.004, 0.05, 0.3):
        found = report(folder, capsys, "--delta", str(delta))
        for one, pair in zip(found["updates"], pairs, strict=True):
            tvs = [np.abs(p - q).sum(-1)[0] / 2 for p, q in zip(*pair, strict=True)]
            of_tokens = np.stack([tv[number // enumerated.WORDS ** (len(tvs) - t)] for t, tv in enumerate(tvs)])
            assert np.abs(of_tokens - delta).min() > 1e-6
            assert one["inside"] == pytest.approx((of_tokens <= delta).mean())
    assert len(words) * len(tvs) == found["updates"][0]["tokens"]


def test_a_measured_kl_limits_the_tv(updates, tmp_path, capsys):
    pairs, reward = updates
    folder = enumerated.record(tmp_path, pairs, reward, trustrl.preset("dppo-full-kl"))
    found = report(folder, capsys)
    ball = found["ball"]
    assert (ball["tv"], ball["kl"]) == (pytest.approx(math.sqrt(0.05 / 2)), 0.05)
    assert ball["max_form"] == pytest.approx(found["xi"] * 3 * 2 * 0.05)  # ξT(T−1)·KL
    for one, pair in zip(found["updates"], pairs, strict=True):
        want = exact.measured(pair, reward[None])
        assert one["max_tv"][1] >= want.max_tv[0] - 1e-6
        kls = max(exact.kl_of(p, q).max() for p, q in zip(*pair, strict=True))
        assert one["max_tv"][1] <= math.sqrt(kls / 2) + 1e-4 or kls > 1.5


def test_a_tv_from_another_anchor_is_not_used():
    columns = {
        "advantage": torch.ones(1), "behavior_logp": torch.tensor([0.5]).log(), "policy_logp": torch.tensor([0.7]).log(),
        "proximal_logp": torch.tensor([0.7]).log(), "kept": torch.ones(1, dtype=torch.bool),
        "divergence_lower": torch.tensor([0.01]), "divergence_upper": torch.tensor([0.02]),
    }  # fmt: skip
    region = trustrl.config_to_dict(regions.DPPO(regions.FullTV(), anchor="proximal"))
    replay = Replay(Piece(columns, torch.zeros(1, dtype=torch.int64), region))
    for anchor, want in (("behavior", (0.2, 0.5)), ("proximal", (0.01, 0.02))):
        _, tv = replay.tv(anchor)
        assert (float(tv.lower), float(tv.upper)) == pytest.approx(want, abs=1e-6)


def test_processes_find_the_same(tmp_path):
    folder = recorded.record(tmp_path, seeds=range(5))
    rewards = Rewards(torch.arange(600), torch.linspace(0.0, 1.0, 600, dtype=torch.float64))
    files = part_files(folder)
    of = partial(sums_of, rewards=rewards, delta=0.15)
    one, two = (count_records(files, of, kind=UpdateSums, columns=COLUMNS, workers=num) for num in (1, 2))
    assert torch.equal(one.updates, two.updates)
    assert torch.equal(one.largest, two.largest)
    torch.testing.assert_close(one.sums, two.sums, rtol=1e-13, atol=1e-13)
    assert one.sums[:, SUMS.index("sequences")].tolist() == [8.0] * 10


def test_rewards_reach_worker_processes_without_shared_memory():
    rewards = Rewards(torch.arange(600), torch.linspace(0.0, 1.0, 600, dtype=torch.float64))
    sent = pickle.loads(ForkingPickler.dumps(rewards))
    assert torch.equal(sent.sequence, rewards.sequence)
    assert torch.equal(sent.reward, rewards.reward)
    assert not any(x.is_shared() for x in (sent.sequence, sent.reward, rewards.sequence, rewards.reward))


def test_sequences_without_a_reward_or_with_a_fault_are_left_out_and_counted(updates, tmp_path, capsys):
    pairs, reward = updates
    _, number = enumerated.enumerate_all(pairs[0])
    given = reward[number].tolist()
    given[3] = None
    broken = [pairs[0], exact.Pairs(pairs[1].behavior, [q.copy() for q in pairs[1].policy])]
    broken[1].policy[0][0, 0, 0] = np.nan
    found = report(enumerated.record(tmp_path, broken, reward, BINARY, rewards=given), capsys)
    first, second = found["updates"]
    faulty = int((number // enumerated.WORDS**2 == 0).sum())
    assert first["sequences"] == 63
    assert found["faulty"] == faulty
    assert found["unrewarded"] == (1 if number[3] // 9 == 0 else 2)
    assert second["sequences"] == 64 - faulty - found["unrewarded"] + 1
    kept = np.delete(reward[number], 3)
    assert first["reward"] == pytest.approx(kept.mean())


def test_a_run_of_unmoved_policies_says_that_nothing_moved(updates, tmp_path, capsys):
    pairs, reward = updates
    found = report(enumerated.record(tmp_path, pairs[:1], reward, FULL), capsys)
    at = found["updates"][0]["published"]
    assert (at["surrogate"], at["over"], at["positive_below"]["max_tv"], at["says"]) == (0.0, None, None, "unchanged")


def test_a_longer_horizon_and_a_wider_range_raise_the_penalties(updates, tmp_path, capsys):
    pairs, reward = updates
    folder = enumerated.record(tmp_path, pairs, reward, FULL)
    before = report(folder, capsys)
    after = report(folder, capsys, "--horizon", "30", "--rewards", "-4", "2")
    assert (after["horizon"], after["xi"], after["half_range"]) == (30, 4.0, 3.0)
    for one, two in zip(before["updates"][1:], after["updates"][1:], strict=True):
        scale = 4.0 / before["xi"]
        assert two["published"]["max_form"] == pytest.approx(one["published"]["max_form"] * scale * 30 * 29 / 6)
        assert two["published"]["sum_form"] == pytest.approx(one["published"]["sum_form"] * scale)
        assert two["published"]["surrogate"] == one["published"]["surrogate"]


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    [
        ({"top_p": 1.0, "top_k": 0, "min_p": None}, False), ({"top_p": 0.9}, True), ({"top_k": 50}, True),
        ({"top_k": -1}, False), ({"min_p": 0.1}, True), (None, None),
    ],
)  # fmt: skip
def test_a_sampler_that_excludes_tokens_is_named(sampling, truncated, updates, tmp_path, capsys):
    pairs, reward = updates
    folder = enumerated.record(tmp_path, pairs, reward, BINARY, about={"sampling": sampling})
    assert report(folder, capsys)["truncated_sampling"] is truncated
    assert main(["bound", str(folder)]) == 0
    assert ("The sampler excluded tokens" in capsys.readouterr().out) is bool(truncated)


@pytest.mark.parametrize(
    ("region", "want"),
    [
        pytest.param(trustrl.preset("dppo-topk-tv"), (0.15, None), id="TV"),
        pytest.param(regions.DPPO(regions.BinaryTV(max_increase=0.3, max_decrease=0.2)), (0.3, None), id="larger side"),
        pytest.param(trustrl.preset("dppo-binary-kl"), (math.sqrt(0.025), 0.05), id="KL"),
        pytest.param(regions.TROLL(bound=0.02), (0.1, 0.02), id="TROLL's ball"),
        pytest.param(trustrl.preset("ppo"), (0.15, None), id="a ratio bounds no TV"),
        pytest.param(
            regions.DPPO(regions.BinaryTV(max_increase=math.inf, max_decrease=0.2)), (0.15, None), id="an open side"
        ),
    ],
)
def test_the_ball_is_that_of_the_recorded_region(region, want):
    found = threshold(None, [trustrl.config_to_dict(region)])
    assert (found.tv, found.kl) == (pytest.approx(want[0]), want[1])
    assert threshold(0.4, [trustrl.config_to_dict(region)]) == Threshold(0.4, None, "--delta")


def test_a_kind_of_region_that_is_not_registered_leaves_the_published_ball():
    assert threshold(None, [{"kind": "unheard-of"}]).source == "the published threshold of DPPO"


def test_no_sequence_that_counts_is_an_error(updates, tmp_path):
    pairs, reward = updates
    folder = enumerated.record(tmp_path, pairs, reward, BINARY)
    sequences = read_rewards(folder)
    elsewhere = sequences._replace(rewards=Rewards(sequences.rewards.sequence + 10_000, sequences.rewards.reward))
    of = partial(sums_of, rewards=elsewhere.rewards, delta=0.15)
    found = count_records(part_files(folder), of, kind=UpdateSums, columns=COLUMNS)
    with pytest.raises(trustrl.errors.RecordError, match="256 without a reward, 0 with a faulty token"):
        bound_report(found, elsewhere, Threshold(0.15, None, "x"))
