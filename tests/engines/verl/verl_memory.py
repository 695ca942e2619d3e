"""One measured training step of a verl worker, in a process of its own: `verl_memory.py PRESET` prints bytes as JSON."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl_regions as regions
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import regions_oracle as oracle, verl_world as world
from trustrl.engines.verl import RegionWorker

V, D, ROWS, PROMPT, RESPONSE, K = 151_936, 64, 8, 16, 128, 20


def batch(rows, length):
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (rows, length), generator=make)
    there = torch.ones(rows, length, dtype=torch.bool)
    logp = torch.full((rows, length), -12.0)
    top = torch.arange(K).expand(rows, length, K)
    return oracle.Batch(
        torch.randint(3, V, (rows, PROMPT), generator=make), ids, there, there,
        torch.linspace(-1, 1, rows).unsqueeze(1).expand(rows, length), logp, logp, logp, top, top - 32.0,
    )  # fmt: skip


def step(worker, rows, length):
    data = regions.as_verl_carries(
        batch(rows, length), global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": False}, micro_batch_size_per_gpu=rows, use_dynamic_bsz=False,
    )  # fmt: skip
    worker.train_mini_batch(data)


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def main(name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        model = oracle.tiny_model(Path(folder), vocab_size=V, hidden_size=D, max_position_embeddings=256)
        worker = regions.training_worker(model, kind=RegionWorker)
    worker.engine_config.infer_micro_batch_size_per_gpu = 1
    region = trustrl.config_to_dict(trustrl.preset(name))
    config = world.actor("trustrl", policy_loss={"region": region, "startup_checks": False})
    worker.set_loss_fn(partial(ppo_loss, config=config))
    for rows, length in ((2, 8), (3, 32)):  # loads, compiles, and makes the optimiser's state
        step(worker, rows, length)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    step(worker, ROWS, RESPONSE)
    gradients = sum(p.numel() * p.element_size() for p in worker.engine.module.parameters())
    print(json.dumps({"peak": resident("VmHWM") - before, "gradients": gradients}))


if __name__ == "__main__":
    main(*sys.argv[1:])
