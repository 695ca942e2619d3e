"""Counts add in any order, and are what plain Python counts."""

import math
import random

import pytest

pytest.importorskip("pyarrow")

import torch
from hypothesis import given, settings, strategies as st

import trustrl
from support import recorded
from trustrl.core.policy_loss import policy_loss
from trustrl.recording import Piece
from trustrl.recording.record_files import part_files
from trustrl.tools.audit import TokenCounts, arm
from trustrl.tools.audit.audit_json import RECORDED, audit_report
from trustrl.tools.calibrate.noise_counts import noise_of

ARMS = [arm(name, trustrl.preset(name)) for name in ("ppo", "dppo-binary-tv", "gspo", "dppo-topk-tv", "troll")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recorded.record(tmp_path_factory.mktemp("records"), noise=0.02)


def at_runs(piece, runs):
    """Only these sequences."""
    here = torch.isin(piece.run, torch.tensor(sorted(runs)))
    _, run = piece.run[here].unique_consecutive(return_inverse=True)
    return Piece({name: x[here] for name, x in piece.columns.items()}, run, piece.region)


def of(piece):
    return TokenCounts({**TokenCounts.of(piece, ARMS).counts, **noise_of(piece).counts})


@given(seed=st.integers(0, 10**6), parts=st.integers(2, 5))
@settings(max_examples=15, deadline=None)
def test_counts_add_whatever_the_parts_their_order_and_their_grouping(folder, seed, parts):
    (whole,) = recorded.pieces(folder)
    draw = random.Random(seed)
    owner = {run: draw.randrange(parts) for run in whole.run.unique().tolist()}
    pieces = [[run for run in owner if owner[run] == part] for part in range(parts)]
    found = [of(at_runs(whole, runs)) for runs in pieces if runs]
    left = found[0]
    for one in found[1:]:
        left = left + one
    draw.shuffle(found)
    right = found[-1]
    for one in reversed(found[:-1]):
        right = one + right
    assert left == right == of(whole)
    assert TokenCounts.from_bytes(left.to_bytes()) == left


def test_different_counts_are_not_equal(folder):
    (whole,) = recorded.pieces(folder)
    assert of(whole) != of(at_runs(whole, [0, 1, 2]))


def test_the_report_is_what_plain_python_counts(folder):
    (piece,) = recorded.pieces(folder)
    rows, files = recorded.columns(folder), part_files(folder)
    found = audit_report(TokenCounts.of(piece, ARMS), ARMS, files, top=3, text_of=str)
    num = len(rows["kept"])
    pi, mu = ([math.exp(x) for x in rows[name]] for name in ("policy_logp", "behavior_logp"))
    advantage = rows["advantage"]
    stops = {
        RECORDED: [not kept for kept in rows["kept"]],
        "ppo": [(a > 0 and p / b > 1.28) or (a < 0 and p / b < 0.8) for a, p, b in zip(advantage, pi, mu, strict=True)],
        "dppo-binary-tv": [
            (a > 0 and p - b > 0.15) or (a < 0 and b - p > 0.15) for a, p, b in zip(advantage, pi, mu, strict=True)
        ],
    }
    assert found["rows"] == num
    for name, stop in stops.items():
        assert found["regions"][name]["stopped"] == sum(stop) > 10, name
        assert found["regions"][name]["stopped_share"] == sum(stop) / num
    for a in stops:
        for b in stops:
            same = sum(x == y for x, y in zip(stops[a], stops[b], strict=True)) / num
            both = sum(x and y for x, y in zip(stops[a], stops[b], strict=True))
            either = sum(x or y for x, y in zip(stops[a], stops[b], strict=True))
            pair = found["agreement"][a][b]
            assert (pair["same"], pair["overlap"]) == (pytest.approx(same), pytest.approx(both / either))
    assert "dppo-topk-tv" not in found["agreement"]
    for stopped in ("ppo", RECORDED):
        ids = [at for at, stop in zip(rows["token_id"], stops[stopped], strict=True) if stop]
        first = found["tokens"][stopped][0]
        assert first["stopped"] == max(map(ids.count, ids)) == ids.count(first["id"])
        assert (first["signed"], first["text"]) == (rows["token_id"].count(first["id"]), str(first["id"]))
    values = {
        "age": (rows["update"], {"0": (0, 1), "1": (1, 2)}),
        "position": (rows["position"], {"0": (0, 1), "2-3": (2, 4), "8-15": (8, 16)}),
        "probability": (mu, {"0.1 to 0.5": (0.1, 0.5), "0.5 to 0.9": (0.5, 0.9)}),
        "advantage": (advantage, {"A < 0": (-math.inf, 0), "A > 0": (0, math.inf)}),
    }
    for kind, (of_token, bins) in values.items():
        listed = {one["bin"]: one["regions"]["ppo"] for one in found["by"][kind]["bins"]}
        for name, (low, high) in bins.items():
            here = [stop for x, stop in zip(of_token, stops["ppo"], strict=True) if low <= x < high]
            assert (listed[name]["tokens"], listed[name]["stopped"]) == (len(here), sum(here)), (kind, name)


def test_stopped_shares_are_the_metric_that_training_logs(folder):
    """`trustrl/masked_share` of the same tokens, faults and advantages of 0 included."""
    (piece,) = recorded.pieces(folder)
    changed = {name: x.clone() for name, x in piece.columns.items()}
    changed["policy_logp"][::7], changed["behavior_logp"][::11], changed["advantage"][::5] = float("nan"), 3.0, 0.0
    piece = Piece(changed, piece.run, piece.region)
    counts = TokenCounts.of(piece, ARMS).counts["arms"].tolist()
    for at, one in enumerate(ARMS[:3], start=1):
        rollout = trustrl.RolloutTokens(
            advantage=changed["advantage"], in_loss=torch.ones(len(piece), dtype=torch.bool),
            behavior_logp=changed["behavior_logp"], sequence_ids=piece.run,
        )  # fmt: skip
        policy = trustrl.PolicyTokens(logp=changed["policy_logp"])
        out = policy_loss(policy, rollout, one.region, reduction=recorded.reduction_of(one.region))
        _, measured, signed, stopped, *_ = counts[at]
        assert stopped / signed == trustrl.rates(out.sums)["trustrl/masked_share"] > 0
        assert measured == out.sums.added["measured"]


def test_ids_that_no_vocabulary_has_are_left_out(folder):
    (piece,) = recorded.pieces(folder)
    ids = piece.columns["token_id"].clone()
    ids[0], ids[1] = 2**31 - 1, -5
    counts = TokenCounts.of(Piece({**piece.columns, "token_id": ids}, piece.run, piece.region), ARMS).counts["ids"]
    assert counts.shape[1] == 256
    assert counts[0].sum() == len(piece) - 2
