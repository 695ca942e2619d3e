"""Small folders of records whose every token is known."""

import torch

import trustrl
from support import recording_batches as batches
from trustrl.core.policy_loss import policy_loss
from trustrl.recording import Recorder, Recording, stream
from trustrl.recording.record_files import part_files
from trustrl.recording.sequence_tables import write_sequences


def reduction_of(region):
    return (
        trustrl.SequenceMeanTokenMean(num_sequences=8) if region.needs().reduction is not None else trustrl.TokenSum()
    )


def record(folder, region=batches.REGION, *, seeds=(0, 1), updates=2, proximal=True, moved=0.4, at=None, **more):
    """Steps of one micro-batch and two updates; the second has moved, the first only by `more["noise"]`."""
    noise = more.pop("noise", 0.0)
    recorder = Recorder(Recording(folder=folder, sample=1.0, ring_steps=0, triggers=()), region, rank=0)
    for step, seed in enumerate(seeds):
        sums = []
        for update in range(updates):
            b = batches.batch(
                seed=seed, first=100 * step, moved=moved if update else noise, proximal=proximal, at=at, **more
            )
            rollout = without_versions(b.rollout)
            out = policy_loss(b.policy, rollout, region, reduction=reduction_of(region))
            recorder.add(out, b.policy, rollout, sequences=b.sequences, step=step, update=update)
            sums.append(out.sums)
        recorder.end_step(step, trustrl.merge(sums))
    recorder.flush()
    return folder


def add_rewards(folder, seeds=(0, 1)):
    """Rewards 0 and 1 in turn, for the sequences of `record`."""
    for step, _ in enumerate(seeds):
        rows = [{"sequence": 100 * step + at, "reward": float(at % 2)} for at in range(8)]
        write_sequences(folder, rows, step=step, rank=0, text=False)
    return folder


def without_versions(rollout):
    """As verl records: the update inside the step says how old a rollout is."""
    names = ("advantage", "in_loss", "behavior_logp", "proximal_logp", "token_ids", "topk")
    return trustrl.RolloutTokens(**{name: getattr(rollout, name) for name in names})


def pieces(folder, rows=65_536):
    return list(stream(part_files(folder), rows=rows))


def columns(folder):
    """Everything in the folder, as plain lists."""
    found = pieces(folder)
    assert len(found) == 1
    return {name: x.tolist() for name, x in found[0].columns.items()}


def worlds(num=400, vocabulary=12, seed=0):
    """Anchor and policy over a whole small vocabulary, tokens drawn from the anchor, advantages of both signs."""
    draw = torch.Generator().manual_seed(seed)
    anchor = torch.log_softmax(2 * torch.randn(num, vocabulary, generator=draw), -1)
    moved = 0.6 * torch.randn(num, vocabulary, generator=draw)
    policy = torch.log_softmax(anchor + moved, -1)
    token = torch.multinomial(anchor.exp(), 1, generator=draw)
    return anchor, policy, token, torch.randn(num, generator=draw).sign()
