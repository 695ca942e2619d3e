"""A bandit that every region must solve: several updates per batch, a known best arm."""

import pytest
import torch

import trustrl
from support.worlds import narrow_preset

PRESETS = trustrl.presets()
ARMS = 72


# SPO's objective has curvature |A|/ε in the ratio: past a step of 2ε/|A| plain gradient descent oscillates.
RATE = {"spo": 1.0}


def learn(name, seeds, *, rounds=100, updates=4, draws=256):
    """Probability of the best arm after training, for each seed; sequences are single draws.

    The bandits of all seeds share each batch, whose loss is the sum of theirs.
    """
    region = narrow_preset(name)
    rate = RATE.get(name, 4.0)
    needs = region.needs()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    reward = torch.zeros(ARMS)
    reward[7] = 1.0
    logits = torch.stack([0.5 * torch.randn(ARMS, generator=g) for g in generators]).requires_grad_()

    def drawn(logp, ids):
        """The values of each bandit's own draws, as one batch."""
        return logp.gather(-1, ids.flatten(1)).reshape(len(seeds) * draws, *ids.shape[2:])

    def whole(logp):
        return logp.unsqueeze(1).expand(-1, draws, ARMS).reshape(len(seeds) * draws, 1, ARMS)

    for _ in range(rounds):
        behavior = torch.log_softmax(logits.detach(), -1)
        arms = torch.stack([
            torch.multinomial(b.exp(), draws, replacement=True, generator=g)
            for b, g in zip(behavior, generators, strict=True)
        ])  # fmt: skip
        advantage = (reward[arms] - reward[arms].mean(-1, keepdim=True)).reshape(-1, 1)
        ids = behavior.topk(needs.topk or 20).indices[:, None, None].expand(-1, draws, 1, -1)
        arms = arms.unsqueeze(-1)
        rollout = trustrl.RolloutTokens(
            behavior_logp=drawn(behavior, arms), proximal_logp=drawn(behavior, arms), advantage=advantage,
            in_loss=torch.ones(len(advantage), 1, dtype=torch.bool), token_ids=arms.reshape(-1, 1),
            topk=trustrl.TopK(ids.flatten(0, 1), drawn(behavior, ids), needs.anchor),
            full=trustrl.FullVocabulary(whole(behavior), needs.anchor),
        )  # fmt: skip
        if needs.reduction is not None:
            reduction = trustrl.SequenceMeanTokenMean(num_sequences=draws)
        else:
            reduction = trustrl.TokenMean(num_tokens=draws)
        for _ in range(updates):
            logp = torch.log_softmax(logits, -1)
            policy = trustrl.PolicyTokens(logp=drawn(logp, arms), topk_logp=drawn(logp, ids), full_logp=whole(logp))
            loss = trustrl.policy_loss(policy, rollout, region, reduction=reduction).loss
            (gradient,) = torch.autograd.grad(loss, logits)
            with torch.no_grad():
                logits -= rate * gradient
    return torch.softmax(logits.detach(), -1)[:, 7].tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_the_best_arm_is_found(name):
    """From about 1 in 72 to better than a fair coin, from two seeds."""
    assert min(learn(name, (0, 1))) > 0.5
