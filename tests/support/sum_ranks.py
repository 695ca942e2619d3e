"""One process of the test of sums over ranks; a module of its own, so that new processes can import it."""

import torch
import torch.distributed as dist

import trustrl
from support.devices import DEVICE
from support.vocab_ranks import start
from support.worlds import mapped, world
from trustrl.engines.common.step_sums import StepSums, on_host

ROWS = 4


def sums_of(rows):
    """The sums of some rows of one batch."""
    batch, region = world(0, rows=ROWS), trustrl.preset("dppo-topk-tv")
    rollout = batch.rollout(k=region.needs().topk)
    policy = batch.policy_tokens(rollout, grad=False)
    policy, rollout = (mapped(x, lambda x: x[rows].to(DEVICE)) for x in (policy, rollout))
    return trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).sums


def agree(rank, ranks, folder):
    start(rank, ranks, folder)
    step = StepSums()
    step.updates = 1
    for row in range(rank, ROWS, ranks):  # one micro-batch each
        step.add(sums_of(slice(row, row + 1)))
    total, whole = on_host(step.total(None)), on_host(sums_of(slice(None)))
    for found, wanted in ((total.added, whole.added), (total.highest, whole.highest)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert total.added["tokens"] > 0
    dist.destroy_process_group()
