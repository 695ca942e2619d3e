"""The memory of one training step of a verl worker at a real vocabulary: 1,024 response tokens, 151,936 ids."""

from functools import partial
from pathlib import Path

import torch
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries

V, D, ROWS, PROMPT, RESPONSE, K = 151_936, 64, 8, 16, 128, 20
LOGITS = ROWS * RESPONSE * V * 4
"""Bytes of the responses' logits in float32: 622 MB."""


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


def model(folder):
    return oracle.tiny_model(folder, vocab_size=V, hidden_size=D, max_position_embeddings=256)


def step(worker, rows, length):
    data = as_verl_carries(
        batch(rows, length), global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": False}, micro_batch_size_per_gpu=rows, use_dynamic_bsz=False,
    )  # fmt: skip
    worker.train_mini_batch(data)


def choose(worker, preset):
    """Sets the region."""
    region = trustrl.config_to_dict(trustrl.preset(preset))
    config = world.actor("trustrl", policy_loss={"region": region, "startup_checks": False})
    worker.set_loss_fn(partial(ppo_loss, config=config))


def peak(worker, preset):
    """Bytes by which the process grew in one step, once everything that stays was made."""
    choose(worker, preset)
    for rows, length in ((2, 8), (3, 32)):  # loads, compiles, and makes the optimiser's state
        step(worker, rows, length)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    step(worker, ROWS, RESPONSE)
    return _resident("VmHWM") - before


def _resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
