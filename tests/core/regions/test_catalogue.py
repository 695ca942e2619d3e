"""Truth tables and identities of OPSM, GMPO, sequence products, the divergence gate and TROLL in sequences."""

import math
from dataclasses import replace

import pytest
import torch

import trustrl
from support.one_row import row
from support.worlds import grad_of, run, world
from trustrl import regions

# ── OPSM ────────────────────────────────────────────────────────────────────────────────────────────────────────────

FALLEN, RISEN = ([0.1, 0.2], [0.4, 0.4]), ([0.4, 0.4], [0.1, 0.2])  # (π, μ); mean log(μ/π) = ±1.04


@pytest.mark.parametrize(
    ("sides", "advantage", "max_drift", "kept"),
    [
        pytest.param(FALLEN, -1.0, 1.0, False, id="A < 0 and fell beyond δ"),
        pytest.param(FALLEN, -1.0, 1.1, True, id="A < 0 and fell within δ"),
        pytest.param(FALLEN, 1.0, 1.0, True, id="A > 0 and fell"),
        pytest.param(RISEN, -1.0, 1.0, True, id="A < 0 and rose"),
        pytest.param(RISEN, 1.0, 1.0, True, id="A > 0 and rose"),
        pytest.param(FALLEN, 0.0, 1.0, True, id="A = 0"),
    ],
)
def test_opsm_drops_a_losing_sequence_that_mu_finds_more_likely(sides, advantage, max_drift, kept):
    (policy, behavior), region = sides, regions.OPSM(max_drift, statistic=None)
    factors, out = row(region, policy, behavior, advantage)
    ratios = [p / b for p, b in zip(policy, behavior, strict=True)]
    assert factors == pytest.approx([r if kept and advantage else 0.0 for r in ratios])
    assert out.decision.keep.all() == kept
    assert trustrl.rates(out.sums)["trustrl/sequence_dropped_share"] == (0.0 if kept else 1.0)


def test_opsm_at_its_bound_is_inside():
    policy = trustrl.PolicyTokens(logp=torch.tensor([[-1.5, -2.5]], dtype=torch.float64))
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[-1.25, -1.75]], dtype=torch.float64), advantage=torch.tensor([-1.0]),
        in_loss=torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip
    for max_drift, kept in ((0.5, True), (0.5 - 1e-9, False)):
        region = regions.OPSM(max_drift, statistic=None)
        assert trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).decision.keep.all() == kept


def test_opsm_masks_single_tokens_of_kept_sequences_by_its_statistic():
    factors, _ = row(regions.OPSM(10.0), [0.5, 0.3], [0.3, 0.31], 1.0)
    assert factors == pytest.approx([0.0, 0.3 / 0.31])  # PPO masks the first, r = 1.67
    region = regions.OPSM(10.0, statistic=regions.BinaryTV(max_increase=0.25))
    assert row(region, [0.5, 0.3], [0.3, 0.31], 1.0)[0] == pytest.approx([5 / 3, 0.3 / 0.31])


def test_opsm_around_the_trainers_policy_still_measures_its_drift_from_the_sampler():
    """π = π' and μ is far: PPO's ratio is 1, and the mean of log μ − log π alone decides."""
    region = regions.OPSM(0.5, anchor="proximal")
    assert region.needs().anchors == {"behavior", "proximal"}
    dropped, _ = row(region, [0.1, 0.2], [0.4, 0.4], -1.0, proximal=[0.1, 0.2])
    kept, _ = row(region, [0.1, 0.2], [0.15, 0.2], -1.0, proximal=[0.1, 0.2])
    assert dropped == [0.0, 0.0]
    assert kept == pytest.approx([1.0, 1.0])


# ── GMPO ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def textbook_gmpo(logp, behavior, advantage, bound):
    """−A·exp(mean of min(s·d, s·clip(d))·s), s the sign of A: the published objective, differentiated by autograd."""
    d = logp - behavior
    s = torch.sign(advantage)
    clipped = s * torch.minimum(s * d, s * d.clamp(-bound, bound))
    return -(advantage[:, 0] * torch.exp(clipped.mean(-1))).mean()


@pytest.mark.parametrize("bound", [0.05, 0.4])
def test_gmpo_is_its_textbook_objective_in_value_and_gradient(bound):
    w = world(4, rows=6, drift=0.4)
    w.in_loss[:] = True
    w.advantage = w.advantage[:, :1].expand_as(w.advantage).clone()
    out, policy = run(regions.GMPO(regions.LogRatio(max_increase=bound)), w)
    logp = policy.logp.detach().clone().requires_grad_()
    want = textbook_gmpo(logp, w.at_token(w.behavior), w.advantage, bound)
    want.backward()
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(policy.logp.grad, logp.grad, rtol=1e-12, atol=1e-14)
    assert not out.decision.keep.all()


def test_a_clipped_token_of_gmpo_has_no_gradient_and_still_moves_the_weight():
    factors, _ = row(regions.GMPO(), [0.9, 0.3], [0.1, 0.3], 1.0)  # d = (2.2, 0), clipped to (0.4, 0)
    assert factors == pytest.approx([0.0, math.exp(0.2)])
    factors, _ = row(regions.GMPO(), [0.9, 0.3], [0.1, 0.3], -1.0)  # the update pulls it back
    assert factors == pytest.approx([3.0, 3.0])


# ── corrections over sequences ──────────────────────────────────────────────────────────────────────────────────────


def corrected(correction, behavior, proximal):
    """The factors of PPO on π = π', which is 1, times the correction's."""
    return row(regions.PPO(anchor="proximal", correction=correction), proximal, behavior, 1.0, proximal)[0]


def test_the_product_and_the_mean_of_a_sequence_are_different_corrections():
    behavior, proximal = [0.2, 0.2, 0.2], [0.3, 0.3, 0.3]  # k = 1.5 at each token; product 3.375, geometric mean 1.5
    band = {"min_ratio": 0.5, "max_ratio": 3.0}
    assert corrected(regions.MIS(**band, level="token"), behavior, proximal) == pytest.approx([1.5] * 3)
    assert corrected(regions.MIS(**band, level="sequence-mean"), behavior, proximal) == pytest.approx([1.5] * 3)
    assert corrected(regions.MIS(**band, level="sequence-product"), behavior, proximal) == [0.0] * 3
    wide = regions.MIS(min_ratio=0.0, max_ratio=4.0, level="sequence-product")
    assert corrected(wide, behavior, proximal) == pytest.approx([3.375] * 3)
    product = regions.TIS(max_ratio=3.0, level="sequence-product")
    assert corrected(product, behavior, proximal) == pytest.approx([3.0] * 3)
    assert corrected(regions.TIS(max_ratio=3.0), behavior, proximal) == pytest.approx([1.5] * 3)


def bernoulli_kl(b, p):
    return b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p))


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_the_gate_compares_the_mean_of_a_sequence_or_each_token(kind):
    behavior, proximal = [0.5, 0.5, 0.5], [0.5, 0.6, 0.52]
    far = [bernoulli_kl(b, p) if kind == "kl" else abs(b - p) for b, p in zip(behavior, proximal, strict=True)]
    divergence = regions.BinaryKL if kind == "kl" else regions.BinaryTV
    k = [p / b for b, p in zip(behavior, proximal, strict=True)]
    mean = sum(far) / 3
    for bound, want in ((mean * 1.001, k), (mean * 0.999, [0.0] * 3)):
        gate = regions.DivergenceGate(divergence=divergence(max_increase=bound))
        assert corrected(gate, behavior, proximal) == pytest.approx(want)
    token = regions.DivergenceGate(divergence=divergence(max_increase=mean), level="token")
    assert corrected(token, behavior, proximal) == pytest.approx([k[0], 0.0, k[2]])


def test_the_gate_measures_from_the_sampler():
    """KL(μ‖π') with μ first: the other order is on the other side of this bound."""
    one, other = bernoulli_kl(0.1, 0.4), bernoulli_kl(0.4, 0.1)
    assert one < other
    gate = regions.DivergenceGate(divergence=regions.BinaryKL(max_increase=(one + other) / 2))
    assert corrected(gate, [0.1], [0.4]) == pytest.approx([4.0])
    assert corrected(gate, [0.4], [0.1]) == [0.0]


# ── TROLL in sequences ──────────────────────────────────────────────────────────────────────────────────────────────


def test_troll_in_sequences_has_the_geometric_mean_of_projected_ratios():
    w = world(3, drift=1.0, vocabulary=96)
    w.in_loss[:] = True
    token, _ = run(regions.TROLL(alpha=0.0), w)
    sequence, policy = run(regions.TROLL(alpha=0.0, level="sequence"), w)
    projected = token.decision.weight.log()  # log π̂/b
    want = projected.mean(-1, keepdim=True).exp().expand_as(projected)
    torch.testing.assert_close(sequence.decision.weight, want, rtol=1e-10, atol=0)
    mean_of_rows = (want[:, :1] * w.advantage).mean(-1).mean()
    assert sequence.loss.item() == pytest.approx(-mean_of_rows.item(), rel=1e-10)
    assert (token.decision.extra["projected"]).any()
    assert grad_of(policy.topk_logp).abs().sum() > 0


def test_the_published_selection_has_no_gradient_at_ids_that_only_the_anchor_keeps():
    w, k = world(7, rows=3, width=5, vocabulary=40, drift=1.5, peak=3.0), 6
    rollout = w.rollout("proximal", k=k)
    top = w.policy.topk(k, -1)
    policy = replace(w.policy_tokens(rollout), topk=trustrl.TopK(top.indices, top.values))
    trustrl.policy_loss(
        policy, rollout, regions.TROLL(k=k, rest="published"), reduction=trustrl.TokenSum()
    ).loss.backward()
    shared = (rollout.topk.ids.unsqueeze(-1) == top.indices.unsqueeze(-2)).any(-1)
    alone = ~shared & (rollout.topk.ids != w.tokens.unsqueeze(-1))
    gradient = grad_of(policy.topk_logp)
    assert (gradient[alone] == 0).all()
    assert (gradient[~alone] != 0).any()


# ── PPO's relaxation and the presets that are points on the axes ────────────────────────────────────────────────────


def test_ppo_relaxed_never_clips_improbable_tokens():
    policy, behavior = [0.15, 0.45, 0.2], [0.09, 0.1, 0.3]
    assert row(regions.PPO(relax_below=0.1), policy, behavior, 1.0)[0] == pytest.approx([0.15 / 0.09, 0.0, 2 / 3])
    assert row(regions.PPO(relax_below=0.1, action="clip"), policy, behavior, 1.0)[0] == pytest.approx(
        [5 / 3, 0.0, 2 / 3]
    )
    assert row(regions.PPO(), policy, behavior, 1.0)[0] == pytest.approx([0.0, 0.0, 2 / 3])
    _, out = row(regions.PPO(relax_below=0.1, action="clip"), policy, behavior, 2.0)
    assert out.loss.item() == pytest.approx(-2 * (5 / 3 + 1.28 + 2 / 3))


@pytest.mark.parametrize(("side", "relaxed"), [("both", 0.0), ("increase", 1.0), ("decrease", -1.0)])
def test_one_side_of_the_clip_is_relaxed_in_gradient_and_value(side, relaxed):
    """The textbook objective by autograd, without its clip at improbable tokens of the relaxed side."""
    w = world(5, rows=6, drift=0.6)
    region = regions.PPO(relax_below=0.1, relax_side=side, action="clip")
    out, policy = run(region, w)
    rollout = w.rollout()
    logp = policy.logp.detach().clone().requires_grad_()
    ratio, advantage = (logp - rollout.behavior_logp).exp(), w.advantage.expand_as(logp)
    free = (rollout.behavior_logp.exp() < 0.1) & ((advantage * relaxed > 0) | (relaxed == 0.0))
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    objective = torch.where(free, ratio * advantage, clipped)
    loss = -(objective * w.in_loss).sum()
    loss.backward()
    plain, _ = run(regions.PPO(), w)
    assert (out.decision.keep & ~plain.decision.keep).any()
    assert not out.decision.keep[w.in_loss].all()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-10)
    torch.testing.assert_close(grad_of(policy.logp), logp.grad, rtol=1e-10, atol=1e-12)
    masked, by_mask = run(regions.PPO(relax_below=0.1, relax_side=side), w)
    assert torch.equal(masked.decision.keep, out.decision.keep)
    assert torch.equal(grad_of(by_mask.logp), grad_of(policy.logp))


def test_dppo_minimal_masks_only_a_losing_token_that_lost_half_of_the_mass():
    region = trustrl.preset("dppo-minimal")
    for (policy, behavior, advantage), kept in {
        (0.1, 0.65, -1.0): False, (0.1, 0.65, 1.0): True, (0.65, 0.1, 1.0): True, (0.65, 0.1, -1.0): True,
        (0.2, 0.65, -1.0): True,
    }.items():  # fmt: skip
        assert (row(region, [policy], [behavior], advantage)[0][0] != 0) == kept


def test_dis_masks_by_the_ratio_alone():
    region = trustrl.preset("dis")
    for (policy, behavior), kept in {
        (0.6, 0.11): True,
        (0.61, 0.1): False,
        (0.29, 0.4): True,
        (0.27, 0.4): False,
    }.items():
        for advantage in (1.0, -1.0):
            assert (row(region, [policy], [behavior], advantage)[0][0] != 0) == kept


def test_gradcheck_of_troll_in_sequences():
    """With one advantage per sequence the objective −A·exp(mean log π̂/b) is a true function of log π."""
    w = world(1, rows=2, width=3, vocabulary=8, drift=1.5)
    w.in_loss[:] = True
    region = regions.TROLL(alpha=0.5, level="sequence", support="full")
    rollout = w.rollout("proximal", advantage=torch.tensor([1.0, -0.7], dtype=torch.float64))
    ids = w.tokens.unsqueeze(-1)

    def loss(logits):
        full = torch.log_softmax(logits, -1)
        policy = trustrl.PolicyTokens(logp=full.gather(-1, ids).squeeze(-1), full_logp=full)
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=2)
        return trustrl.policy_loss(policy, rollout, region, reduction=reduction).loss

    logits = w.policy.clone().requires_grad_()
    out = loss(logits)
    (ours,) = torch.autograd.grad(out, logits)
    # The pull differentiates KL(π‖sg π̂) by π alone, so finite differences are taken of the objective without it.
    region = regions.TROLL(alpha=0.0, level="sequence", support="full")
    assert torch.autograd.gradcheck(loss, (logits,), atol=1e-6)
    assert not torch.allclose(ours, torch.autograd.grad(loss(logits), logits)[0])


# ── the unbiased penalty ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_weighted_penalty_has_the_exact_value_and_gradient_in_expectation(estimator):
    """Over all tokens a with probability μ(a): Σ μ(a)·penalty(a) = KL(π‖ref), and its gradient by the logits too."""
    g = torch.Generator().manual_seed(0)
    behavior, reference = (torch.log_softmax(torch.randn(7, generator=g, dtype=torch.float64), -1) for _ in range(2))
    logits = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)

    def penalty(unbiased):
        rollout = trustrl.RolloutTokens(
            behavior_logp=behavior.unsqueeze(-1), advantage=torch.zeros(7), in_loss=torch.ones(7, 1, dtype=torch.bool),
            reference_logp=reference.unsqueeze(-1),
        )  # fmt: skip
        policy = trustrl.PolicyTokens(logp=torch.log_softmax(logits, -1).unsqueeze(-1))
        reduction = trustrl.TokenWeights(behavior.exp().unsqueeze(-1))
        term = trustrl.KLPenalty(coefficient=1.0, estimator=estimator, unbiased=unbiased)
        loss = trustrl.policy_loss(
            policy, rollout, regions.PolicyGradient(), reduction=reduction, penalties=[term]
        ).loss
        return loss, torch.autograd.grad(loss, logits)[0]

    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - reference)).sum()
    (gradient,) = torch.autograd.grad(exact, logits)
    value, ours = penalty(True)
    assert value.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-13)
    assert not torch.allclose(penalty(False)[1], gradient, rtol=1e-2)
