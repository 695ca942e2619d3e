"""One rank of a real verl training worker: the waits, copies and kernels of one training step, to a file."""

import json
import sys
from functools import partial

import torch.distributed as dist
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl_regions import training_worker

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.device_counts import counted
from support.verl_step import as_verl_carries
from trustrl.engines.verl import RegionWorker

LOSSES = []
"""The counts of each call of the loss."""


def watched(loss):
    """Counts every call of a loss."""

    def call(**kwargs):
        with counted("verl", "transformers") as counts:
            out = loss(**kwargs)
        LOSSES.append(counts)
        return out

    call.keywords = getattr(loss, "keywords", {})
    return call


class Watched(RegionWorker):
    """Counts each call of the region's loss."""

    def _loss(self, theirs, **kwargs):
        return watched(partial(super()._loss, theirs))(**kwargs)


def places(counter):
    """Returns file, function and number of each counted line."""
    return [(place.file, place.function, number) for place, number in counter.items()]


def step(worker, batch, **meta):
    """Returns the counts of one training step, and of the loss of its last micro-batch."""
    rows = len(batch.prompts)
    data = as_verl_carries(
        batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False},
        **meta,
    )  # fmt: skip
    LOSSES.clear()
    with counted("verl", "transformers") as counts:
        worker.train_mini_batch(data)
    whole, loss = counts.totals(), LOSSES[-1].totals()
    return {
        "micro_batches": len(LOSSES),
        "step": {"waits": places(counts.waits), "copies": places(counts.copies), "kernels": whole["kernels"]},
        "loss": {"waits": places(LOSSES[-1].waits), "copies": places(LOSSES[-1].copies), "kernels": loss["kernels"]},
    }


def main(folder, out):
    dist.init_process_group("gloo")
    found = {}
    worker = training_worker(folder, kind=Watched)
    for name, case in oracle.CASES.items():
        settings = {"region": trustrl.config_to_dict(case.region), "metrics": "core", "startup_checks": False}
        more = {key: value for key, value in case.settings.items() if key not in ("bypass", "calculate_entropy")}
        config = world.actor("trustrl", loss_agg_mode=case.mode, policy_loss=settings, **more)
        worker.set_loss_fn(partial(ppo_loss, config=config))
        meta = {key: case.settings[key] for key in ("bypass", "calculate_entropy") if key in case.settings}
        found[name] = step(worker, oracle.batch(folder, 0, case), **meta)
    stock = training_worker(folder, kind=TrainingWorker)
    stock.set_loss_fn(watched(partial(ppo_loss, config=world.actor("vanilla", loss_agg_mode="token-mean"))))
    found["verl's own PPO"] = step(stock, oracle.batch(folder, 0, next(iter(oracle.CASES.values()))))
    with open(out, "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
