"""Each process of the rank tests: one region's loss in ms-swift's trainer on its own rows, with a sharded model."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from swift.rl_core.data import GRPOBatch
from transformers import AutoModelForCausalLM

from support import swift_world as world
from support.fsdp2_shardings import RESHARDED, SHARDINGS, move, shard, whole
from trustrl.engines.common.vocabulary_forward import LogitsForward

LENGTHS = ((8, 3, 5, 1), (2, 6, 1, 4))
"""Completion tokens of each row of each rank."""

PROMPT = 4
EVERY = (*SHARDINGS, RESHARDED)


def rows_of(lengths, seed):
    """(inputs of the model, ms-swift's batch) of one rank, with random tokens."""
    make = torch.Generator().manual_seed(seed)
    on = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(3, world.VOCABULARY, (len(lengths), PROMPT + max(lengths)), generator=make)
    attention = torch.cat([torch.ones(len(lengths), PROMPT, dtype=torch.long), on.long()], 1)
    advantages = torch.randn(len(lengths), generator=make)
    return {"input_ids": ids, "attention_mask": attention}, batch_of(on, advantages)


def batch_of(in_loss, advantages):
    """ms-swift's batch before its log-probs are computed."""
    return GRPOBatch(
        completion_mask=in_loss,
        truncated_mask=torch.zeros(len(in_loss), dtype=torch.bool),
        seq_lengths=in_loss.sum(1),
        advantages=advantages,
        num_items_in_batch=in_loss.sum(),
        logits_to_keep=in_loss.shape[1],
    )


@torch.no_grad()
def record(trainer, inputs, batch):
    """Records the anchor as ms-swift does for a rollout."""
    trainer._recording = trainer._reads_topk
    batch.old_per_token_logps = trainer._get_per_token_logps_and_entropies(trainer.model, dict(inputs), batch)[0]
    trainer._recording = False


def gradients(trainer, folder, sharding, rank):
    """The gradients of the region's loss, some way from the rollout weights, as the mean over ranks."""
    trainer.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    LogitsForward(trainer.model, float32_head=False)  # as the adapter does
    if sharding is not None:
        shard(trainer.model, sharding, dist.get_world_size())
    trainer.model.train()
    inputs, batch = rows_of(LENGTHS[rank], rank)
    record(trainer, inputs, batch)
    trainer._first_loss = False
    move(trainer.model, 0.05)
    loss, _ = trainer._compute_loss_and_metrics(trainer.model, dict(inputs), batch)
    loss.backward()
    found = {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    if sharding is None:
        for x in found.values():
            dist.all_reduce(x)
            x /= dist.get_world_size()
    return found


def main(rank, folder, given):
    torch.set_num_threads(1)
    given = json.loads(given)
    trainer = world.trainer_of(given)  # before the process group, in which it would wrap the model in DDP
    trainer.current_gradient_accumulation_steps = 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=len(LENGTHS))
    found = {sharding: gradients(trainer, given["model"], sharding, int(rank)) for sharding in (None, *EVERY)}
    wanted = found.pop(None)
    scale = max(x.abs().max() for x in wanted.values())
    errors = {
        sharding: max(((x - wanted[name]).abs().max() / scale).item() for name, x in parts.items())
        for sharding, parts in found.items()
    }
    if rank == "0":
        Path(folder, "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
