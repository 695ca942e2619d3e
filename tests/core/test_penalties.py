"""Penalties beside a region: bad values, missing data, and what they never touch."""

import pytest
import torch

import trustrl
from trustrl import regions

BAD = (0, 1)


def batch(side, **changes):
    """Four tokens; `side` serves as reference log-prob and as entropy."""
    logp = torch.tensor([[-0.5, -1.0, -0.2, -3.0]], requires_grad=True)
    entropy = side.clone().requires_grad_()
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[-0.6, -0.9, -0.2, -2.5]]), advantage=torch.tensor([0.7]),
        in_loss=torch.tensor([[True, True, True, False]]), reference_logp=side,
    )  # fmt: skip
    return logp, entropy, trustrl.PolicyTokens(logp=logp, entropy=entropy), rollout


def faults(out):
    return {
        name.removeprefix("fault/"): int(x) for name, x in out.sums.added.items() if name.startswith("fault/") and x
    }


PENALTIES = [trustrl.KLPenalty(coefficient=0.1), trustrl.KLPenalty(coefficient=0.1, gradient="score"), trustrl.EntropyBonus(coefficient=0.1)]  # fmt: skip


@pytest.mark.parametrize("penalty", PENALTIES, ids=["kl", "kl by score", "entropy"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -1e30])
@pytest.mark.parametrize("where", ["in the loss", "outside"])
def test_a_bad_value_of_a_penalty_leaves_the_policy_term_alone(penalty, value, where):
    side = torch.full((1, 4), -1.0)
    at = BAD if where == "in the loss" else (0, 3)
    side[at] = value
    logp, entropy, policy, rollout = batch(side)
    out = trustrl.policy_loss(policy, rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty])
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logp.grad).all()
    if value == -1e30 and penalty.kind == "entropy" and where == "in the loss":
        assert faults(out) == {}  # finite, if absurd: an exact result
        assert entropy.grad[at] == pytest.approx(-0.1)
        return
    assert faults(out) == ({f"penalty_{penalty.kind}": 1} if where == "in the loss" else {})
    plain_logp, _, plain, _ = batch(side)
    trustrl.policy_loss(plain, rollout, regions.DPPO(), reduction=trustrl.TokenSum()).loss.backward()
    torch.testing.assert_close(logp.grad[at], plain_logp.grad[at])
    assert entropy.grad is None or entropy.grad[at] == 0
    # The other tokens' penalties are those of a healthy batch.
    healthy_logp, _, healthy, healthy_rollout = batch(torch.full((1, 4), -1.0))
    trustrl.policy_loss(
        healthy, healthy_rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty]
    ).loss.backward()
    torch.testing.assert_close(logp.grad[0, [0, 2]], healthy_logp.grad[0, [0, 2]])


@pytest.mark.parametrize("gap", [79.0, 81.0], ids=["just representable", "just not"])
def test_an_estimate_that_leaves_float32_is_counted(gap):
    """e⁸⁰ is the last step before float32 has no number for π_ref/π; the estimate is dropped well before that."""
    side = torch.full((1, 4), -1.0)
    logp, _, policy, rollout = batch(side)
    with torch.no_grad():
        logp[BAD] = -1.0 - gap
    penalty = trustrl.KLPenalty(coefficient=1e-10, estimator="k2")
    out = trustrl.policy_loss(policy, rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty])
    assert faults(out) == ({} if gap < 80 else {"penalty_kl": 1})


@pytest.mark.parametrize(
    ("penalty", "message"),
    [
        (trustrl.EntropyBonus(coefficient=1.0), "PolicyTokens.entropy must be given for an EntropyBonus, got None."),
        (trustrl.KLPenalty(coefficient=1.0), "RolloutTokens.reference_logp must be given for a KLPenalty, got None."),
    ],
)
def test_a_penalty_without_its_data_is_refused(penalty, message):
    logp = torch.zeros(1, 1)
    rollout = trustrl.RolloutTokens(behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool())
    with pytest.raises(trustrl.errors.MissingDataError) as caught:
        trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), rollout, regions.DPPO(), reduction=trustrl.TokenSum(), penalties=[penalty]
        )
    assert str(caught.value) == message
