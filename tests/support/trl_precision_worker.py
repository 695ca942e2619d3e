"""One rank of TRL's trainer in some precision: every kind of region, and the policy against itself."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from support import self_divergence as own, trl_world as world
from support.devices import start_process_group
from support.fsdp2_shardings import as_accelerate_shards, whole
from trustrl.engines.trl import trainer as adapter

ROWS = 2
"""Sequences of a micro-batch, in the recording pass and in the update."""


def trainer_of(kind, folder, precision, fsdp2=False, half_weights=False, float32_head=False):
    """Our trainer, with the model wrapped as accelerate wraps it."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    weights = dtype if half_weights else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights, attn_implementation="eager")
    trainer = world.ours(
        own.KINDS[kind], model, bf16=precision == "bf16" and not half_weights, per_device_train_batch_size=ROWS,
        num_generations=ROWS, loss_type="grpo" if kind in own.PER_SEQUENCE else "dapo", cast_lm_head_to_fp32=float32_head,
    )  # fmt: skip
    trainer.model = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    if fsdp2:
        trainer.model = as_accelerate_shards(trainer.model, precision)
    trainer.model.train()
    return trainer


def measured(folder, layout, precision, kind):
    """The policy against itself in one update."""
    trainer = trainer_of(kind, folder, precision, **layout)
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = own.tokens(folder, rank)
    rollout = {
        "prompt_ids": tokens.prompts, "prompt_mask": torch.ones_like(tokens.prompts, dtype=torch.int),
        "completion_ids": tokens.responses, "completion_mask": tokens.in_loss.int(), "advantages": tokens.advantages[:, 0],
    }  # fmt: skip
    if trainer._needs.full:
        trainer._remember_head()
    rollout = {name: x.to(trainer.accelerator.device) for name, x in rollout.items()}
    rollout |= trainer._recorder.record(trainer.model, rollout, version=0, rows=ROWS)
    with own.watched(adapter) as seen:
        for start in range(0, len(own.LENGTHS), ROWS):
            part = {name: x[start : start + ROWS] for name, x in rollout.items() if x is not None}
            part["num_items_in_batch"] = tokens.in_loss.sum()
            trainer._compute_loss(trainer.model, part).backward()
    gradient = trainer.model.lm_head.weight.grad
    assert gradient is not None
    assert whole(gradient).isfinite().all()
    found = own.measured(seen, precision)
    if not dist.is_initialized():
        return found
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return own.merged(parts)


def main(folder, out, about, kinds, layout):
    torch.set_num_threads(1)
    precision = about["precision"]
    if layout.get("fsdp2"):
        start_process_group()
    rows = own.cells(partial(measured, folder, layout, precision), kinds, **about)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
