"""What each process of the rank tests does: one region's loss on its share of one batch, and the gradients of it."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from support import trl_world as world
from support.fsdp2_shardings import SHARDINGS, move, shard, whole
from trustrl import regions
from trustrl.engines.trl import record

LENGTHS = (12, 5, 7, 2, 1, 4)
"""Completion tokens of each row: 24 in the first half and 7 in the second, whose longest is 4 instead of 12."""

REGIONS = {
    "dppo-binary-tv": regions.DPPO(regions.BinaryTV(max_increase=0.01, max_decrease=0.01)),
    "dppo-topk-tv": regions.DPPO(regions.TopKTV(max_increase=0.1, max_decrease=0.1, k=20)),
    "dppo-full-kl": regions.DPPO(regions.FullKL(max_increase=0.06, max_decrease=0.06)),
    "troll": regions.TROLL(bound=0.06, k=64),
}
"""On TRL's own head; on ours, with the rollout's top-K, with the rollout's head, and with gradients at 64 ids."""

AVERAGES = ("dapo", "grpo")
"""Over the tokens of all ranks, and over sequences."""


def rank():
    return int(os.environ.get("RANK", 0))


def num_ranks():
    return int(os.environ.get("WORLD_SIZE", 1))


def my_rows():
    """This rank's rows of the fixed batch, padded to their own longest completion as TRL pads them."""
    lengths = torch.tensor(LENGTHS)
    on = torch.arange(world.COMPLETION) < lengths.unsqueeze(1)
    whole = world.sequences() | {"completion_mask": on.int()}
    world.draw(world.tiny_model(), whole)
    share = len(LENGTHS) // num_ranks()
    mine = slice(rank() * share, (rank() + 1) * share)
    width = int(lengths[mine].max())
    part = {name: x[mine, :width] if name.startswith("completion") else x[mine] for name, x in whole.items()}
    return part | {"num_items_in_batch": lengths.sum()}


def run(name, average, wrapping=None):
    """(gradients, logged rates) of one region's loss, some way from the rollout weights."""
    rows = len(LENGTHS) // num_ranks()
    trainer = world.ours(
        REGIONS[name], given={"startup_checks": True}, loss_type=average, per_device_train_batch_size=rows,
        num_generations=len(LENGTHS),
    )  # fmt: skip
    assert trainer.accelerator.num_processes == num_ranks()
    model = trainer.model
    if wrapping == "ddp":
        model = trainer.accelerator.prepare_model(trainer.model)
        assert isinstance(model, DistributedDataParallel)
    elif wrapping is not None:
        shard(trainer.model, wrapping, num_ranks())
        assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    model.train()
    inputs = {name: x.to(trainer.accelerator.device) for name, x in my_rows().items()}
    if trainer._needs.full:
        trainer._remember_head()
    inputs |= trainer._recorder.record(trainer.model, inputs, version=0, rows=rows)
    move(trainer.model)
    trainer.state.global_step = 3
    trainer._compute_loss(model, inputs).backward()
    gradients = {key.removeprefix("module."): whole(p.grad).cpu() for key, p in model.named_parameters()}
    return gradients, {key: values[-1] for key, values in trainer._metrics["train"].items() if "/" in key}


def trained():
    """(parameters, logs) after two rollouts and four updates in TRL's own loop."""
    trainer = world.ours(
        REGIONS["troll"], given={"startup_checks": True}, per_device_train_batch_size=4, num_generations=4,
        num_iterations=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
    )  # fmt: skip
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert not torch.equal(before, trainer.model.lm_head.weight)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: p.detach() for name, p in trainer.model.named_parameters()}, history


def recorded(folder):
    """(parameters, logs) of TRL's own trainer after two updates, and its record in `folder`."""
    trainer = world.stock(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=8, max_steps=2, logging_steps=1,
        num_iterations=2, learning_rate=1e-2,
    )  # fmt: skip
    record(trainer, folder / "stock")
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: p.detach() for name, p in trainer.model.named_parameters()}, history


def main(folder):
    torch.set_num_threads(1)
    folder = Path(folder)

    def save(name, tensors, more):
        save_file({key: x.contiguous() for key, x in tensors.items()}, folder / f"{name}, rank {rank()}.safetensors")
        (folder / f"{name}, rank {rank()}.json").write_text(json.dumps(more))

    for name in REGIONS:
        for average in AVERAGES:
            save(f"{name}, {average}, ddp", *run(name, average, "ddp"))
        for sharding in SHARDINGS:
            save(f"{name}, dapo, {sharding}", *run(name, "dapo", sharding))
    save("trained", *trained())
    save("recorded", *recorded(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
