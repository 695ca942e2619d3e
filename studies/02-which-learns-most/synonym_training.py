"""One training run in the world of synonyms: rollouts, group-relative advantages, and updates under a trust region."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import synonym_world as world
import torch
from synonym_world import HIDDEN, PLACES, VOCABULARY, Policy, draw, evaluate, grammar, logp_at
from torch import Tensor

import trustrl
from trustrl.config.axes import Region
from trustrl.core.policy_loss import LossOutput

GROUP = 8
PROMPTS = 16
"""Prompts of a rollout, with GROUP answers each."""

MINIBATCHES = 4
"""Parts of a rollout, each one update. A rollout with fewer updates has fewer parts; with more, several passes."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of a run. Two runs of one seed draw the same prompts, and the same first rollout."""

    preset: str
    seed: int
    lr: float
    overrides: dict[str, Any] = field(default_factory=dict)
    updates: int = 16
    """Updates on each rollout."""

    rollouts: int = 12
    mismatch: float = 0.04
    """Mean |log μ − log π'| of sampled tokens in nats, from noise on the sampler's head. 0 adds no noise."""

    name: str = ""
    """Name of the arm; the preset's by default."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings as a result stores them."""
        return {**asdict(self), "name": self.name or self.preset}

    def region(self) -> Region:
        """Returns the region of the run."""
        return trustrl.preset(self.preset, **self.overrides)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Answers that the sampler gave, flattened to one row for each token."""

    prompts: Tensor
    tokens: Tensor
    reward: Tensor
    advantage: Tensor
    behavior: Tensor
    """log μ (B, T)."""

    head: Tensor
    """The sampler's head: the policy's with noise."""


class Sampler:
    """Samples answers from the policy's weights with noise on the head, whose size follows the requested mismatch."""

    def __init__(self, run: Run, policy: Policy) -> None:
        self.run, self.policy = run, policy
        self.generator = torch.Generator().manual_seed(1000 + run.seed)
        self.scale = run.mismatch / HIDDEN**0.5

    @torch.no_grad()
    def sample(self) -> Rollout:
        """Returns a rollout and its group-relative advantages: reward minus the mean of the group."""
        rules, policy = grammar(), self.policy
        chosen = rules.train[torch.randperm(len(rules.train), generator=self.generator)[:PROMPTS]]
        prompts = chosen.repeat_interleave(GROUP, 0)
        head = policy.head
        if self.run.mismatch:
            head = head + self.scale * torch.randn(head.shape, generator=self.generator)
        value, previous = rules.attribute(prompts), torch.full((len(prompts),), VOCABULARY)
        tokens, behavior = [], []
        for place in range(PLACES):
            hidden = policy.hidden(torch.full_like(previous, place), value[:, place], previous)
            logits = torch.addmm(policy.bias, hidden, head.T)
            weights = logits.sub_(logits.amax(1, keepdim=True)).exp_()
            previous = draw(weights, self.generator)
            behavior.append((weights.gather(1, previous.unsqueeze(1)).squeeze(1) / weights.sum(1)).log())
            tokens.append(previous)
        answers = torch.stack(tokens, 1)
        reward = rules.right(prompts, answers).all(1).float()
        centered = (reward.view(-1, GROUP) - reward.view(-1, GROUP).mean(1, keepdim=True)).flatten()
        return Rollout(prompts, answers, reward, centered, torch.stack(behavior, 1), head)

    def follow(self, measured: float) -> None:
        """Adjusts the noise to the mismatch measured on the last rollout."""
        if self.run.mismatch:
            self.scale *= min(max(self.run.mismatch / measured, 0.5), 2.0)


@torch.no_grad()
def recorded(policy: Policy, rollout: Rollout, needs: Any) -> trustrl.RolloutTokens:
    """Returns the rollout as a record of tokens, with the anchor's top K if the region needs one."""
    hidden = policy.at_answers(rollout.prompts, rollout.tokens)
    ids = rollout.tokens.reshape(-1)
    proximal, _ = logp_at(policy, hidden, ids.unsqueeze(1))
    topk = None
    if needs.topk:
        head = rollout.head if needs.anchor == "behavior" else policy.head
        logp = torch.log_softmax(torch.addmm(policy.bias, hidden, head.T), dim=1)
        values, columns = logp.topk(needs.topk, dim=1)
        shape = (*rollout.tokens.shape, needs.topk)
        topk = trustrl.TopK(columns.view(shape), values.view(shape), of=needs.anchor)
    return trustrl.RolloutTokens(
        advantage=rollout.advantage,
        in_loss=torch.ones_like(rollout.tokens, dtype=torch.bool),
        behavior_logp=rollout.behavior,
        proximal_logp=proximal.view(rollout.tokens.shape),
        token_ids=rollout.tokens,
        topk=topk,
    )


def part_of(record: trustrl.RolloutTokens, rows: Tensor) -> trustrl.RolloutTokens:
    """Returns some answers of the record."""
    topk = record.topk and trustrl.TopK(record.topk.ids[rows], record.topk.logp[rows], of=record.topk.of)
    assert record.behavior_logp is not None
    assert record.proximal_logp is not None
    assert record.token_ids is not None
    return trustrl.RolloutTokens(
        advantage=record.advantage[rows],
        in_loss=record.in_loss[rows],
        behavior_logp=record.behavior_logp[rows],
        proximal_logp=record.proximal_logp[rows],
        token_ids=record.token_ids[rows],
        topk=topk,
    )


def policy_tokens(policy: Policy, prompts: Tensor, record: trustrl.RolloutTokens) -> trustrl.PolicyTokens:
    """Returns the policy's log-probs at the sampled tokens and at the anchor's top K, with gradient."""
    assert record.token_ids is not None
    tokens = record.token_ids
    hidden, ids = policy.at_answers(prompts, tokens), tokens.reshape(-1, 1)
    if record.topk is not None:
        ids = torch.cat([ids, record.topk.ids.flatten(0, 1)], dim=1)
    logp, _ = logp_at(policy, hidden, ids)
    topk = None if record.topk is None else logp[:, 1:].view(record.topk.ids.shape)
    return trustrl.PolicyTokens(logp=logp[:, 0].view(tokens.shape), topk_logp=topk)


Watch = Callable[[int, int, Policy, Rollout, trustrl.RolloutTokens, Tensor, LossOutput], None]
"""Called after each loss with the rollout's and the update's number, and the rows of the update."""


def train(run: Run, watch: Watch | None = None) -> dict[str, Any]:
    """Trains and returns the run's settings and results: held-out accuracy after every rollout, and its mean."""
    began, region = time.process_time(), run.region()
    policy = world.start()
    optimizer = torch.optim.Adam(policy.parameters(), lr=run.lr, fused=True)
    sampler, shuffle = Sampler(run, policy), torch.Generator().manual_seed(5000 + run.seed)
    accuracy, rewards, mismatches, masked, moved = [evaluate(policy)[0]], [], [], [], []
    parts = min(run.updates, MINIBATCHES)
    for number in range(run.rollouts):
        rollout = sampler.sample()
        record = recorded(policy, rollout, region.needs())
        assert record.proximal_logp is not None
        mismatches.append(float((rollout.behavior - record.proximal_logp).abs().mean()))
        sampler.follow(mismatches[-1])
        rewards.append(float(rollout.reward.mean()))
        for update in range(run.updates):
            if update % parts == 0:
                groups = torch.randperm(PROMPTS, generator=shuffle).view(parts, -1)
            rows = (groups[update % parts].unsqueeze(1) * GROUP + torch.arange(GROUP)).flatten()
            part = part_of(record, rows)
            made = policy_tokens(policy, rollout.prompts[rows], part)
            out = trustrl.policy_loss(
                made, part, region, reduction=trustrl.TokenMean(num_tokens=part.in_loss.numel()), on_nonfinite="raise"
            )
            if watch is not None:
                watch(number, update, policy, rollout, record, rows, out)
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            if update == run.updates - 1:
                rates = trustrl.rates(out.sums)
                masked.append(float(rates.get("trustrl/masked_share", 0.0)))
                moved.append(float((made.logp.detach() - part.behavior_logp).abs().mean()))
        accuracy.append(evaluate(policy)[0])
    return {
        **run.as_dict(),
        "auc": sum(accuracy[1:]) / run.rollouts,
        "accuracy": [round(x, 5) for x in accuracy],
        "reward": [round(x, 4) for x in rewards],
        "mismatch_measured": round(sum(mismatches) / len(mismatches), 5),
        "masked_last": round(sum(masked) / len(masked), 5),
        "log_ratio_last": round(sum(moved) / len(moved), 5),
        "cpu_seconds": round(time.process_time() - began, 2),
    }
