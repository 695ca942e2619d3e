"""Records of every sequence of a small model: each is recorded as often as μ draws it, so means are expectations."""

import bound_pairs as exact
import numpy as np
import torch

import trustrl
from trustrl.core.policy_loss import policy_loss
from trustrl.core.records import FullVocabulary
from trustrl.recording import Recorder, Recording, SequenceRows

HORIZON, WORDS = 3, 3
QUARTERS = np.array([0.5, 0.25, 0.25])


def pair(rng, far):
    """One pair; every probability of μ is a quarter or a half, so μ(y) is a multiple of 1/64."""
    behavior, policy = [], []
    for t in range(HORIZON):
        p = np.stack([rng.permutation(QUARTERS) for _ in range(WORDS**t)])[None]
        q = p * np.exp(far * rng.normal(size=p.shape))
        behavior.append(p)
        policy.append(q / q.sum(-1, keepdims=True))
    return exact.Pairs(behavior, policy)


def enumerate_all(pairs):
    """Returns the words of every recorded sequence (n, T), and the number of the sequence."""
    mu, _, _ = exact.sequences_of(pairs)
    times = np.rint(mu[0] * 4**HORIZON).astype(int)
    assert times.sum() == 4**HORIZON
    number = np.repeat(np.arange(WORDS**HORIZON), times)
    return np.stack([number // WORDS ** (HORIZON - 1 - t) % WORDS for t in range(HORIZON)], 1), number


def record(folder, updates, reward, region, *, about=None, rewards=None):
    """Records pairs with one μ, one update each. `reward` has an entry for each of the V^T sequences."""
    words, number = enumerate_all(updates[0])
    at = [torch.tensor(number // WORDS ** (HORIZON - t)) for t in range(HORIZON)]
    token = torch.tensor(words)

    def log_probs(policies):
        full = torch.stack([torch.tensor(p[0])[at[t]] for t, p in enumerate(policies)], 1).log().float()
        return full, full.gather(-1, token.unsqueeze(-1)).squeeze(-1)

    full, logp = log_probs(updates[0].behavior)
    ids = torch.arange(len(words)) + 1000
    recorder = Recorder(Recording(folder=folder, sample=1.0, ring_steps=0, triggers=()), region, rank=0, about=about)
    rollout = trustrl.RolloutTokens(
        advantage=torch.ones(len(words)), in_loss=torch.ones_like(token, dtype=torch.bool), behavior_logp=logp,
        token_ids=token, full=FullVocabulary(full) if region.needs().full else None,
    )  # fmt: skip
    for update, pairs in enumerate(updates):
        new_full, new = log_probs(pairs.policy)
        policy = trustrl.PolicyTokens(logp=new, full_logp=new_full if region.needs().full else None)
        out = policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
        recorder.add(out, policy, rollout, sequences=ids, step=0, update=update)
    given = torch.tensor(reward[number]).tolist() if rewards is None else rewards
    recorder.add_sequences(SequenceRows(sequence=ids.tolist(), reward=given), step=0)
    recorder.end_step(0, None)
    return folder
