"""TROLL on a selection of ids without a bucket: both sides are normalized over the cells before they are divided."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import trustrl
from support import troll_oracle as oracle
from support.troll_corpus import normal
from support.worlds import world
from trustrl import regions
from trustrl.errors import MissingDataError

BOUND = 0.05
K = 6
RESTS = ("published", "fill")


def selected_cells(rest, log_p, log_b, sampled, k, tail_mass):
    if rest == "published":
        return oracle.published_cells(log_p, log_b, sampled, k, tail_mass)
    return oracle.filled_cells(log_p, log_b, sampled, k)


def loss_on_selection(region, w, logits, impl="eager", reduction=None):
    """The loss as a function of logits, with the policy's own top ids."""
    logp, k = normal(logits), region.k
    rollout = w.rollout(region.anchor, k=k)
    own = logp.topk(k, -1)
    policy = trustrl.PolicyTokens(
        logp=w.at_token(logp),
        topk_logp=logp.gather(-1, rollout.topk.ids),
        topk=trustrl.TopK(own.indices, own.values),
    )
    return trustrl.policy_loss(policy, rollout, region, reduction=reduction or trustrl.TokenSum(), impl=impl)


def small(seed=7, drift=1.0, **settings):
    w = world(seed, **{"rows": 2, "width": 4, "vocabulary": 16, "peak": 2.0, "drift": drift, **settings})
    w.in_loss[:] = True
    return w


def test_a_token_inside_the_ball_has_the_ratio_of_the_normalized_numbers():
    """Kept masses of 0.68 and 0.66: the raw ratio is 0.97, and a normalized π over a raw b would be 1.47."""
    b = torch.tensor([[[0.33, 0.33, 0.17, 0.17]]], dtype=torch.float64)
    p = torch.tensor([[[0.34, 0.34, 0.16, 0.16]]], dtype=torch.float64)
    logits = p.log().requires_grad_()
    rollout = trustrl.RolloutTokens(
        proximal_logp=b[..., 0].log(), token_ids=torch.zeros(1, 1, dtype=torch.long), advantage=torch.ones(1),
        in_loss=torch.ones(1, 1, dtype=torch.bool), topk=trustrl.TopK(torch.tensor([[[0, 1]]]), b[..., :2].log(), "proximal"),
    )  # fmt: skip
    logp = normal(logits)
    policy = trustrl.PolicyTokens(
        logp=logp[..., 0], topk_logp=logp[..., :2], topk=trustrl.TopK(torch.tensor([[[0, 1]]]), logp[..., :2])
    )
    for rest in RESTS:
        out = trustrl.policy_loss(policy, rollout, regions.TROLL(k=2, rest=rest), reduction=trustrl.TokenSum())
        assert not out.decision.extra["projected"].any()
        assert out.decision.weight.item() == pytest.approx((0.34 / 0.68) / (0.33 / 0.66), rel=1e-12)
        (gradient,) = torch.autograd.grad(out.loss, logits, retain_graph=True)
        # −∇log(π(a)/(π(0) + π(1))): the ids outside the selection have none.
        torch.testing.assert_close(gradient[0, 0], torch.tensor([-0.5, 0.5, 0.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("drift", [0.1, 1.0], ids=["mostly inside", "mostly outside"])
@pytest.mark.parametrize(("rest", "tail_mass"), [("published", 0.0), ("published", 0.3), ("fill", 0.0)])
def test_weights_and_gradients_are_those_of_the_definition(rest, tail_mass, drift):
    w = small(drift=drift)
    region = regions.TROLL(k=K, rest=rest, tail_mass=tail_mass, alpha=0.7)
    logits = w.policy.clone().requires_grad_()
    out = loss_on_selection(region, w, logits)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    inside = (~out.decision.extra["projected"]).double().mean()
    assert inside > 0.5 if drift < 0.5 else inside < 0.5
    total = 0.0
    for i, t in w.in_loss.nonzero().tolist():
        log_p, log_b = w.policy[i, t].tolist(), w.proximal[i, t].tolist()
        cells = selected_cells(rest, log_p, log_b, int(w.tokens[i, t]), K, tail_mass)
        advantage = w.advantage[i, t].item()
        policy, anchor = oracle.sides(cells, log_p)
        kl = float((np.exp(policy) * (policy - anchor)).sum())
        assert out.decision.extra["projected_kl_before"][i, t].item() == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert out.decision.weight[i, t].item() == pytest.approx(oracle.troll_weight(cells, log_p, BOUND), rel=1e-6)
        want = torch.from_numpy(oracle.troll_gradient(cells, log_p, advantage, BOUND, 0.7))
        torch.testing.assert_close(gradient[i, t], want, rtol=1e-5, atol=1e-7)
        total += oracle.troll_loss(cells, log_p, advantage, BOUND, 0.7)
    assert out.loss.item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("rest", RESTS)
def test_in_sequences_the_weight_is_the_geometric_mean_of_the_definitions(rest):
    w = small(drift=0.4)
    w.advantage = w.advantage[:, :1]
    region = regions.TROLL(k=K, rest=rest, alpha=0.0, level="sequence")
    logits = w.policy.clone().requires_grad_()
    out = loss_on_selection(region, w, logits, reduction=trustrl.SequenceMeanTokenMean(num_sequences=2))
    assert 0 < out.decision.extra["projected"].double().mean() < 1
    for i in range(2):
        logs = []
        for t in range(4):
            log_p, log_b = w.policy[i, t].tolist(), w.proximal[i, t].tolist()
            cells = selected_cells(rest, log_p, log_b, int(w.tokens[i, t]), K, region.tail_mass)
            logs.append(math.log(oracle.troll_weight(cells, log_p, BOUND)))
        assert out.decision.weight[i].tolist() == pytest.approx([math.exp(sum(logs) / 4)] * 4, rel=1e-6)
    # The value is the objective, so the gradient must be the value's own, through log π̂ of every token.
    again = replace(region, bound=0.04)
    assert torch.autograd.gradcheck(
        lambda x: loss_on_selection(again, w, x, reduction=trustrl.SequenceMeanTokenMean(num_sequences=2)).loss,
        (logits,),
        atol=1e-6,
    )


@pytest.mark.parametrize("rest", RESTS)
def test_gradcheck_of_a_selection(rest):
    w = small(drift=0.4)
    logits = w.policy.clone().requires_grad_()
    region = regions.TROLL(k=K, rest=rest, alpha=0.0)
    assert torch.autograd.gradcheck(lambda x: loss_on_selection(region, w, x).loss, (logits,), atol=1e-6)


@pytest.mark.parametrize("rest", RESTS)
def test_a_selection_of_every_id_equals_the_whole_distribution(rest):
    w = small(drift=0.5)
    region = regions.TROLL(k=16, rest=rest, tail_mass=0.0)
    logits = w.policy.clone().requires_grad_()
    out = loss_on_selection(region, w, logits)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    dense = trustrl.policy_loss(
        trustrl.PolicyTokens(logp=w.at_token(normal(logits)), full_logp=normal(logits)),
        w.rollout("proximal"),
        regions.TROLL(support="full"),
        reduction=trustrl.TokenSum(),
    )
    assert 0 < out.decision.extra["projected"].double().mean() < 1
    torch.testing.assert_close(out.decision.weight, dense.decision.weight, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(dense.loss, logits)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("rest", [*RESTS, "bucket"])
def test_the_weight_is_continuous_across_the_balls_edge(rest):
    """A ball that a token just fits into and one that is smaller by 3e-6 of its size give nearly the same weight."""
    w = small(drift=0.6)
    kl = loss_on_selection(regions.TROLL(k=K, rest=rest), w, w.policy).decision.extra["projected_kl_before"]
    for i, t in w.in_loss.nonzero().tolist():
        edge = kl[i, t].item() / (1 + 1e-4)
        inside, outside = (
            loss_on_selection(regions.TROLL(bound, k=K, rest=rest), w, w.policy).decision
            for bound in (edge * (1 + 1e-6), edge * (1 - 2e-6))
        )
        assert not inside.extra["projected"][i, t]
        assert outside.extra["projected"][i, t]
        assert outside.weight[i, t].item() == pytest.approx(inside.weight[i, t].item(), rel=1e-3)


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_policy_equal_to_the_anchor_has_the_ratio_1(rest, dtype):
    w = small(drift=0.0, mismatch=0.0)
    rollout = w.rollout("proximal", dtype=dtype, k=K)
    policy = w.policy_tokens(rollout, dtype=dtype)
    policy = replace(policy, topk=trustrl.TopK(rollout.topk.ids, policy.topk_logp.detach().clone()))
    out = trustrl.policy_loss(policy, rollout, regions.TROLL(k=K, rest=rest), reduction=trustrl.TokenSum())
    assert (out.decision.weight == 1).all()
    assert not out.decision.extra["projected"].any()
    assert (out.decision.extra["projected_kl_before"].abs() < 1e-12).all()


def test_the_published_selection_needs_the_policys_own_ids():
    w = small()
    rollout = w.rollout("proximal", k=K)
    with pytest.raises(MissingDataError, match=r"PolicyTokens\.topk must be given"):
        trustrl.policy_loss(
            w.policy_tokens(rollout), rollout, regions.TROLL(k=K, rest="published"), reduction=trustrl.TokenSum()
        )


# ── the distance from the projection of the whole distribution ──────────────────────────────────────────────────────


def most_probable(logp, mass):
    """The ids that hold at least this mass, −1 elsewhere, and their log-probs."""
    p, ids = logp.detach().exp().sort(-1, descending=True)
    ids = ids.masked_fill(p.cumsum(-1) - p >= mass, -1)
    return ids, logp.gather(-1, ids.clamp(min=0))


def weight_and_gradient(rest, w, mass):
    """Weights, and the gradient by the logits, with cells that hold at least this mass on each side."""
    logits = w.policy.clone().requires_grad_()
    logp, size = normal(logits), w.policy.shape[-1]
    rollout, policy = w.rollout("proximal", k=size), trustrl.PolicyTokens(logp=w.at_token(logp), full_logp=logp)
    region = regions.TROLL(support="full")
    if rest != "whole":
        ids, anchor = most_probable(w.proximal, mass)
        own = None if rest == "bucket" else trustrl.TopK(*most_probable(logp, mass))
        rollout = replace(rollout, topk=trustrl.TopK(ids, anchor, "proximal"))
        policy = replace(policy, topk_logp=logp.gather(-1, ids.clamp(min=0)), topk=own)
        region = regions.TROLL(k=size, rest=rest)
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    return out.decision.weight, torch.autograd.grad(out.loss, logits)[0]


def distances():
    """The table of the page."""
    lines = ["| drift | kept mass | `bucket` | `published` | `fill` |", "|---|---|---|---|---|"]
    for drift in (0.4, 0.8):
        w = world(9, rows=8, width=16, vocabulary=200, peak=2.0, drift=drift, mismatch=0.0)
        w.in_loss[:] = True
        weight, gradient = weight_and_gradient("whole", w, 1.0)
        for mass in (1.0, 0.9, 0.7):
            row = [f"{drift:g}", f"{mass:g}"]
            for rest in ("bucket", "published", "fill"):
                a, b = weight_and_gradient(rest, w, mass)
                of_weights = (a / weight - 1).abs().median().item()
                row.append(f"{of_weights:.1%}, {((b - gradient).norm() / gradient.norm()).item():.0%}")
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def test_the_page_has_the_measured_distances_from_the_whole_distribution():
    page = (Path(__file__).parents[3] / "docs" / "algorithms" / "troll.md").read_text()
    assert f"<!-- begin distances -->\n{distances()}\n<!-- end distances -->" in page
