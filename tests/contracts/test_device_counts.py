"""A loss and its sums never wait for the device, whatever the region."""

import pytest
import torch

import trustrl
from support.device_counts import counted
from support.worlds import world


def loss_and_sums(name):
    region = trustrl.preset(name)
    needs, batch = region.needs(), world(0)
    rollout = batch.rollout(needs.anchor, dtype=torch.float32, k=max(needs.topk, 20))
    policy = batch.policy_tokens(rollout, dtype=torch.float32)
    reduction = trustrl.TokenMean(num_tokens=batch.num_tokens)
    if needs.reduction is not None:
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=len(batch.tokens))
    with counted() as counts:
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()
    return counts


@pytest.mark.parametrize("name", trustrl.presets())
def test_nothing_waits_for_the_device(name):
    counts = loss_and_sums(name)
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)
    assert counts.kernels


def test_waits_and_copies_are_seen():
    x = torch.arange(4.0)
    with counted() as counts:
        bool((x > 1).any())
        x[x > 1]
        x.nonzero()
        torch.tensor([1.0])
    assert sum(counts.waits.values()) == 3
    assert sum(counts.copies.values()) == 1
