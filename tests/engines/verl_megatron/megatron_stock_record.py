"""One rank of a verl worker on Megatron with verl's own loss: one step without a record, and one with it."""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import verl_megatron as megatron
from verl.workers.utils.losses import ppo_loss

from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.common.stock_tokens import FOLDER, SAMPLE
from trustrl.engines.verl import RegionWorker


def gradients(worker, batch):
    """Gradients of one update, at learning rate 0."""
    worker.set_loss_fn(partial(ppo_loss, config=world.actor("vanilla")))
    kept, step = [], type(worker.engine).optimizer_step

    def watched():
        kept.append(megatron.main_gradients(worker.engine))
        return step(worker.engine)

    worker.engine.optimizer_step = watched
    rows = len(batch.prompts) * worker.engine.get_data_parallel_size()
    worker.train_mini_batch(
        as_verl_carries(
            batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
        )
    )
    (found,) = kept
    return found


def main(out, how):
    dist.init_process_group("gloo")
    how = megatron.DEFAULTS | how
    folder = megatron.model_folder(how)
    worker = megatron.training_worker(folder, how, kind=RegionWorker)
    batch = oracle.batch(folder, worker.engine.get_data_parallel_rank())
    off = gradients(worker, batch)
    os.environ |= {FOLDER: f"{out}/records", SAMPLE: "1"}
    on = gradients(worker, batch)
    same = all(torch.equal(off[name], on[name]) for name in off) and off.keys() == on.keys()
    moved = any(x.any().item() for x in off.values())
    facts = {"same": same, "moved": moved, "speaks": worker.engine.is_mp_src_rank_with_outputs()}
    torch.save({"facts": facts, "batch": batch._asdict()}, f"{out}/found-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(sys.argv[1], json.loads(sys.argv[2]))
