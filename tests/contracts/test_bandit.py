"""A bandit that every region must solve: several updates per batch, a known best arm."""

import pytest
import torch

import trustrl

PRESETS = trustrl.presets()
ARMS = 72


# SPO's objective has curvature |A|/ε in the ratio: past a step of 2ε/|A| plain gradient descent oscillates.
RATE = {"spo": 1.0}


def learn(name, seed, *, rounds=100, updates=4, draws=256):
    """Probability of the best arm after training; sequences are single draws."""
    region = trustrl.preset(name)
    rate = RATE.get(name, 4.0)
    needs = region.needs()
    g = torch.Generator().manual_seed(seed)
    reward = torch.zeros(ARMS)
    reward[7] = 1.0
    logits = (0.5 * torch.randn(ARMS, generator=g)).requires_grad_()
    for _ in range(rounds):
        behavior = torch.log_softmax(logits.detach(), -1)
        arms = torch.multinomial(behavior.exp(), draws, replacement=True, generator=g).unsqueeze(1)
        advantage = reward[arms] - reward[arms].mean()
        ids = behavior.topk(needs.topk or 20).indices.expand(draws, 1, -1)
        rollout = trustrl.RolloutTokens(
            behavior_logp=behavior[arms], proximal_logp=behavior[arms], advantage=advantage,
            in_loss=torch.ones(draws, 1, dtype=torch.bool), token_ids=arms,
            topk=trustrl.TopK(ids, behavior[ids], needs.anchor),
            full=trustrl.FullVocabulary(behavior.expand(draws, 1, ARMS), needs.anchor),
        )  # fmt: skip
        if name == "gspo":
            reduction = trustrl.SequenceMeanTokenMean(num_sequences=draws)
        else:
            reduction = trustrl.TokenMean(num_tokens=draws)
        for _ in range(updates):
            logp = torch.log_softmax(logits, -1)
            policy = trustrl.PolicyTokens(logp=logp[arms], topk_logp=logp[ids], full_logp=logp.expand(draws, 1, ARMS))
            loss = trustrl.policy_loss(policy, rollout, region, reduction=reduction).loss
            (gradient,) = torch.autograd.grad(loss, logits)
            with torch.no_grad():
                logits -= rate * gradient
    return float(torch.softmax(logits.detach(), -1)[7])


@pytest.mark.parametrize("name", PRESETS)
def test_the_best_arm_is_found(name):
    """From about 1 in 72 to better than a fair coin, from two seeds."""
    for seed in (0, 1):
        assert learn(name, seed) > 0.5
