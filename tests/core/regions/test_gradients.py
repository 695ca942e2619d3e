"""Gradients: closed forms from the oracle, gradcheck where the loss is a true function, PPO's textbook form."""

import numpy as np
import pytest
import torch

import trustrl
from support import oracle
from support.worlds import grad_of, log, run, world
from trustrl import regions

CLOSED_FORM = sorted(oracle.ROWS | oracle.WHOLE)
SEEDS = range(4)


@pytest.mark.parametrize("name", CLOSED_FORM)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drift", [0.1, 0.7], ids=["near", "far"])
def test_the_gradient_is_the_closed_form(name, seed, drift):
    """∂loss/∂log π(a) = −M·w·A (over the sequence's length and their number for GSPO), to 1e-12."""
    w = world(seed, drift=drift)
    _, policy = run(name, w)
    case = w.case()
    want = -oracle.factors(name, case) * case.advantage
    if trustrl.preset(name).needs().reduction is not None:
        want = want / (np.maximum(case.in_loss.sum(1, keepdims=True), 1) * case.in_loss.shape[0])
    np.testing.assert_allclose(policy.logp.grad.numpy(), want * case.in_loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in CLOSED_FORM if n.endswith(("-scaling", "-capped"))])
def test_a_capped_preset_has_its_closed_form_where_the_cap_acts(name):
    w = world(1, drift=2.5, rows=12)
    out, policy = run(name, w)
    want = -oracle.factors(name, w.case()) * w.case().advantage
    np.testing.assert_allclose(policy.logp.grad.numpy(), want * w.case().in_loss, rtol=1e-12, atol=1e-12)
    assert (out.decision.extra["capped"] & out.decision.keep & w.in_loss).any()


@pytest.mark.parametrize(
    "name", [n for n in CLOSED_FORM if n not in ("pg-is", "cispo", "sapo", "spo", "drpo", "vespo")]
)
def test_the_closed_form_cases_reach_both_verdicts(name):
    """The comparison above must not have kept or stopped everything."""
    kept = []
    for seed in SEEDS:
        for drift in (0.1, 0.7) if not name.startswith("trm") else (0.02, 0.08, 0.2):
            if name in ("kpop", "dppo-minimal"):
                drift = 4.0
            w = world(seed, drift=drift, rows=12)
            out, _ = run(name, w)
            kept.append(out.decision.keep[w.in_loss])
    share = torch.cat(kept).double().mean()
    assert 0.02 < share < 0.999


@pytest.mark.parametrize("name", [n for n in CLOSED_FORM if n not in ("troll",)])
def test_only_the_sampled_tokens_log_prob_carries_gradient(name):
    """Divergences decide; they are not differentiated."""
    _, policy = run(name, world(1))
    assert policy.logp.grad.abs().sum() > 0 or name.startswith("trm") or name == "flash-reinforce"
    assert policy.topk_logp.grad is None
    assert policy.full_logp.grad is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.2, 0.2), (0.1, 0.4)])
def test_ppo_clip_is_a_mask_on_the_ratio(seed, low, high):
    """The textbook min/clip objective and the masked form have the same gradient everywhere."""
    w = world(seed, rows=16, width=64, drift=0.4)
    region = regions.PPO(regions.Ratio(max_decrease=low, max_increase=high))
    out, policy = run(region, w)
    logp = policy.logp.detach().clone().requires_grad_()
    ratio = torch.exp(logp - w.at_token(w.behavior))
    textbook = -torch.minimum(ratio * w.advantage, ratio.clamp(1 - low, 1 + high) * w.advantage)
    textbook[w.in_loss].sum().backward()
    assert 0.05 < out.decision.keep[w.in_loss].double().mean() < 0.95
    torch.testing.assert_close(policy.logp.grad, logp.grad, rtol=0, atol=1e-7)


def test_ppo_with_action_clip_reports_the_textbook_loss():
    w = world(2, drift=0.4)
    out, _ = run(regions.PPO(action="clip"), w)
    ratio = torch.exp(w.at_token(w.policy) - w.at_token(w.behavior))
    textbook = -torch.minimum(ratio * w.advantage, ratio.clamp(0.8, 1.28) * w.advantage)[w.in_loss].sum()
    assert out.loss.item() == pytest.approx(textbook.item(), rel=1e-12)


def test_dual_clip_equals_its_textbook_form():
    """For A < 0 the objective is max(min(rA, clip(r)A), cA)."""
    w = world(3, rows=32, drift=2.0)
    region = regions.PPO(dual_clip=3.0, action="clip")
    out, policy = run(region, w)
    logp = policy.logp.detach().clone().requires_grad_()
    ratio = torch.exp(logp - w.at_token(w.behavior))
    clipped = torch.minimum(ratio * w.advantage, ratio.clamp(0.8, 1.28) * w.advantage)
    objective = torch.where(w.advantage < 0, torch.maximum(clipped, 3.0 * w.advantage), clipped)
    loss = -objective[w.in_loss].sum()
    loss.backward()
    runaway = (w.advantage < 0) & (ratio > 3) & w.in_loss
    assert runaway.any()
    assert not out.decision.keep[runaway].any()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(policy.logp.grad, logp.grad, rtol=0, atol=1e-10)


def true_loss(region, w, **kwargs):
    """The loss as a function of log π of the sampled tokens."""
    rollout = w.rollout()

    def loss(logp):
        policy = trustrl.PolicyTokens(logp=logp)
        return trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), **kwargs).loss

    return loss


@pytest.mark.parametrize(
    "region",
    [
        pytest.param(regions.SAPO(), id="sapo"),
        pytest.param(regions.SAPO(temperature_positive=3.0, temperature_negative=0.5), id="sapo, other temperatures"),
        pytest.param(regions.SPO(), id="spo"),
        pytest.param(regions.DRPO(), id="drpo"),
        pytest.param(regions.TrustRegion(regions.Ratio(max_increase=0.3, max_decrease=0.1), action="penalize"), id="penalize, two widths"),
        pytest.param(regions.PPO(action="clip"), id="ppo, textbook"),
        pytest.param(regions.PPO(action="clip", dual_clip=1.5), id="ppo, dual clip"),
        pytest.param(regions.SAPO(anchor="proximal", correction=regions.TIS()), id="sapo, corrected"),
    ],
)  # fmt: skip
def test_gradcheck_where_the_loss_is_a_true_function(region):
    w = world(5, rows=3, width=6, drift=0.5)
    logp = w.at_token(w.policy).clone().requires_grad_()
    # Away from edges: finite differences must not straddle a clip bound or r = 1.
    ratio = (w.at_token(w.policy) - w.at_token(w.anchor(region.needs().anchor))).exp()
    for edge in (0.8, 1.0, 1.28, 1.5):
        assert (ratio - edge).abs().min() > 1e-4
    assert torch.autograd.gradcheck(true_loss(region, w), (logp,))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_pathwise_penalty_is_a_true_function(estimator):
    w = world(6, rows=3, width=6)
    penalty = trustrl.KLPenalty(coefficient=0.7, estimator=estimator)
    rollout = w.rollout(reference_logp=w.at_token(w.proximal))

    def loss(logp):
        policy = trustrl.PolicyTokens(logp=logp)
        # A stands still at 0: the penalty alone remains.
        return trustrl.policy_loss(
            policy, trustrl.RolloutTokens(behavior_logp=rollout.behavior_logp, advantage=torch.zeros(3), in_loss=rollout.in_loss, reference_logp=rollout.reference_logp),
            regions.PolicyGradient(), reduction=trustrl.TokenSum(), penalties=[penalty],
        ).loss  # fmt: skip

    logp = w.at_token(w.policy).clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (logp,))


@pytest.mark.parametrize(
    ("estimator", "gradient", "want"),
    [
        ("k1", "pathwise", lambda x: 1.0),
        ("k2", "pathwise", lambda x: x),
        ("k3", "pathwise", lambda x: 1 - np.exp(-x)),
        ("k1", "score", lambda x: x),
        ("k2", "score", lambda x: 0.5 * x * x),
        ("k3", "score", lambda x: np.exp(-x) - 1 + x),
    ],
)
def test_penalty_gradients_are_the_stated_ones(estimator, gradient, want):
    """x = log π − log π_ref."""
    logp = torch.tensor([[log(0.5), log(0.2)]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[log(0.4), log(0.6)]], dtype=torch.float64)
    rollout = trustrl.RolloutTokens(
        behavior_logp=logp.detach(), advantage=torch.zeros(1), in_loss=torch.ones(1, 2, dtype=torch.bool), reference_logp=reference
    )  # fmt: skip
    penalty = trustrl.KLPenalty(coefficient=2.0, estimator=estimator, gradient=gradient)
    out = trustrl.policy_loss(
        trustrl.PolicyTokens(logp=logp), rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty]
    )
    out.loss.backward()
    x = (logp.detach() - reference).numpy()
    np.testing.assert_allclose(logp.grad.numpy(), 2.0 * np.broadcast_to(want(x), x.shape), rtol=1e-12)
    value = {"k1": x, "k2": 0.5 * x * x, "k3": np.exp(-x) - 1 + x}[estimator]
    assert out.terms["kl"].item() == pytest.approx(2.0 * value.sum(), rel=1e-12)


def test_the_entropy_bonus_is_minus_its_coefficient_times_entropy():
    w = world(7)
    rollout = w.rollout()
    policy = w.policy_tokens(rollout)
    entropy = policy.entropy.clone().requires_grad_()
    policy = trustrl.PolicyTokens(logp=policy.logp, entropy=entropy)
    out = trustrl.policy_loss(
        policy,
        rollout,
        regions.DPPO(),
        reduction=trustrl.TokenSum(),
        penalties=[trustrl.EntropyBonus(coefficient=0.01)],
    )
    out.loss.backward()
    torch.testing.assert_close(entropy.grad, -0.01 * w.in_loss.double())
    assert out.terms["entropy"].item() == pytest.approx(-0.01 * entropy[w.in_loss].sum().item())


def test_a_penalty_is_masked_only_when_asked():
    """One token outside the region and pushed further: its penalty stays unless `only_kept`."""
    logp = torch.tensor([[log(0.9), log(0.5)]], dtype=torch.float64, requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[log(0.5), log(0.5)]], dtype=torch.float64), advantage=torch.ones(1),
        in_loss=torch.ones(1, 2, dtype=torch.bool), reference_logp=torch.full((1, 2), log(0.3), dtype=torch.float64),
    )  # fmt: skip

    def gradient(only_kept):
        logp.grad = None
        penalty = trustrl.KLPenalty(coefficient=1.0, estimator="k2", only_kept=only_kept)
        trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty]
        ).loss.backward()
        return logp.grad[0, 0].item()

    assert gradient(False) == pytest.approx(log(0.9) - log(0.3))
    assert gradient(True) == 0.0


def test_ipos_log_ratio_term_is_differentiated():
    w = world(8, drift=0.3)
    _, plain = run(regions.IPO(), w)
    _, with_term = run(regions.IPO(log_ratio_penalty=0.25), w)
    log_ratio = w.at_token(w.policy) - w.at_token(w.behavior)
    want = torch.where(w.in_loss, 0.25 * 2 * log_ratio, 0.0)
    torch.testing.assert_close(grad_of(with_term.logp) - grad_of(plain.logp), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "region",
    [*map(trustrl.preset, trustrl.presets()), regions.IPO(log_ratio_penalty=0.1), regions.TROLL(alpha=0.0)],
    ids=[*trustrl.presets(), "ipo with its penalty", "troll without its pull"],
)
def test_without_an_advantage_only_a_penalty_that_the_region_names_has_a_gradient(region):
    """The others are homogeneous in the advantage: trainers that scale it scale their loss."""
    w = world(5, vocabulary=96)
    _, policy = run(region, w, advantage=torch.zeros_like(w.advantage))
    moved = sum(grad_of(x).abs().sum() for x in (policy.logp, policy.topk_logp, policy.full_logp))
    assert (moved > 0) == (region.needs().penalty is not None)


def test_max_ratio_caps_the_weight_and_counts():
    w = world(9, drift=2.0)
    out, policy = run(regions.DPPO(regions.BinaryTV(max_increase=1.0), max_ratio=1.5), w)
    ratio = (w.at_token(w.policy) - w.at_token(w.behavior)).exp()
    want = torch.where(w.in_loss, -ratio.clamp(max=1.5) * w.advantage, 0.0)
    torch.testing.assert_close(policy.logp.grad, want, rtol=1e-12, atol=1e-12)
    capped = ((ratio > 1.5) & w.in_loss).double().sum() / w.in_loss.sum()
    assert trustrl.rates(out.sums)["trustrl/capped_share"] == pytest.approx(capped.item())
    assert 0 < capped < 1
