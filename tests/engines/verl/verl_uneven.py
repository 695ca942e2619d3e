"""Memory of a verl worker's step at even and uneven lengths, in a process of its own.

`verl_uneven.py LONGEST` prints a table, and the peaks as JSON.
"""

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
from support import regions_oracle as oracle, uneven, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.verl import RegionWorker

PROMPT = 4


def sequences(lengths):
    make, rows, longest = torch.Generator().manual_seed(0), len(lengths), int(lengths.max())
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    logp = torch.full((1, 1), -6.0).expand(mask.shape)
    unread = torch.zeros(1, 1, 1).expand(*mask.shape, 1)
    batch = oracle.Batch(
        torch.randint(3, uneven.VOCABULARY, (rows, PROMPT), generator=make),
        torch.randint(3, uneven.VOCABULARY, mask.shape, generator=make),
        mask, mask, torch.linspace(-1, 1, rows).unsqueeze(1).expand(mask.shape), logp, logp, logp, unread, unread,
    )  # fmt: skip
    return as_verl_carries(
        batch, global_batch_size=rows, mini_batch_size=rows, epochs=2, seed=0, dataloader_kwargs={"shuffle": False},
        micro_batch_size_per_gpu=rows, use_dynamic_bsz=False,
    )  # fmt: skip


def step_of(worker, region):
    """A recording pass and two updates in one micro-batch each, as a function of the lengths."""
    config = world.actor("trustrl", policy_loss={"region": trustrl.config_to_dict(region), "startup_checks": False})
    worker.set_loss_fn(partial(ppo_loss, config=config))

    def step(lengths):
        worker.engine_config.infer_micro_batch_size_per_gpu = len(lengths)
        worker.train_mini_batch(sequences(lengths))

    return step


def main(longest):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        model = oracle.tiny_model(Path(folder), **uneven.ONE_LAYER)
        worker = regions.training_worker(model, kind=RegionWorker, remove_padding=True, attention="no_attention")
    found = uneven.peaks(int(longest), partial(step_of, worker))
    uneven.report(found)
    print(json.dumps({name: {key: peak._asdict() for key, peak in one.items()} for name, one in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
