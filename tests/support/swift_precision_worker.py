"""One rank of ms-swift's trainer in some precision: every kind of region, and the policy against itself."""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from support import self_divergence as own, swift_ranks_worker as ranks, swift_world as world
from support.fsdp2_shardings import as_accelerate_shards, whole
from support.rendezvous import NAMES
from trustrl.engines.common.vocabulary_forward import LogitsForward
from trustrl.engines.swift import trainer as adapter

ROWS = 2
"""Sequences of a micro-batch, in the recording pass and in the update."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(trainer, kind, folder, precision, fsdp2=False, half_weights=False):
    """Puts a region and the shared model into the trainer, wrapped as accelerate wraps it."""
    region = own.KINDS[kind]
    trainer.region, trainer._needs = region, region.needs()
    trainer.loss_type = "grpo" if kind in own.PER_SEQUENCE else "bnpo"
    trainer._settings = trainer._settings._replace(region=region)
    trainer._first_loss, trainer._reads_topk = False, bool(trainer._needs.topk)
    trainer._region_metrics._sums.clear()
    dtype = DTYPES[precision] if half_weights else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    LogitsForward(model, float32_head=False)  # as the adapter does
    model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
    trainer.model = as_accelerate_shards(model, precision) if fsdp2 else model
    trainer.model.train()


def measured(trainer, folder, layout, precision, kind):
    """The policy against itself in one update, or None if ms-swift's adapter refuses the region."""
    if own.KINDS[kind].needs().full:
        return None
    prepare(trainer, kind, folder, precision, **layout)
    tokens = own.tokens(folder, dist.get_rank() if dist.is_initialized() else 0)
    ids = torch.cat([tokens.prompts, tokens.responses], 1)
    attention = torch.cat([torch.ones_like(tokens.prompts), tokens.in_loss.long()], 1)
    with own.watched(adapter) as seen:
        for start in range(0, len(ids), ROWS):
            part = slice(start, start + ROWS)
            inputs = {"input_ids": ids[part], "attention_mask": attention[part]}
            batch = ranks.batch_of(tokens.in_loss[part], tokens.advantages[part, 0])
            ranks.record(trainer, inputs, batch)
            trainer._compute_loss_and_metrics(trainer.model, dict(inputs), batch)[0].backward()
    assert whole(trainer.model.lm_head.weight.grad).isfinite().all()
    found = own.measured(seen, precision)
    if not dist.is_initialized():
        return found
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return own.merged(parts)


def trainer_of(precision, layout):
    """ms-swift's trainer of a small run, outside torchrun's process group, in which it would wrap models in DDP."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(TRUSTRL_REGION="dppo-binary-tv", TRUSTRL_BEHAVIOR="trainer")
    autocast = precision == "bf16" and not layout
    with tempfile.TemporaryDirectory() as folder:
        settings = world.write(folder) | {"bf16": str(autocast).lower(), "fp16": "false"}
        trainer = world.trainer_of(settings)
    assert trainer.accelerator.mixed_precision == ("bf16" if autocast else "no")
    trainer.temperature, trainer.current_gradient_accumulation_steps = own.TEMPERATURE, 1
    return trainer


def main(folder, out, about, kinds, layout):
    torch.set_num_threads(1)
    rank, ranks_started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    precision = about["precision"]
    trainer = trainer_of(precision, layout)
    if layout.get("fsdp2"):
        dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=ranks_started)
    rows = own.cells(partial(measured, trainer, folder, layout, precision), kinds, **about)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
