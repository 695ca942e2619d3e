"""One rank of verl's own Megatron worker on gloo: trained, saved and trained on; and another one, loaded and trained on."""

import json
import os
import sys

import torch
import torch.distributed as dist
from megatron_weights import as_verl_wants, exported, training_worker
from verl.trainer.config import CheckpointConfig

LEARNING_RATE = 1e-2


def cross_entropy(model_output, data, dp_group=None):
    return -model_output["log_probs"].values().mean(), {}


def trained(worker, sequences):
    """Makes one update on this rank's sequences."""
    worker.set_loss_fn(cross_entropy)
    rows = len(sequences)
    worker.train_batch(as_verl_wants(sequences, global_batch_size=rows, update_lr_scheduler=True))


def steps(worker):
    """The steps that the optimizers' parameters have made."""
    chained = worker.engine.optimizer.chained_optimizers
    return sorted({state["step"].item() for one in chained for state in one.optimizer.state.values()})


def main(folder, out, how):
    dist.init_process_group("gloo")
    first, second, third = torch.load(f"{out}-sequences").chunk(3)
    settings = {"lr": LEARNING_RATE, "checkpoint": CheckpointConfig(), **how}
    worker = training_worker(folder, **settings)
    trained(worker, first)
    worker.save_checkpoint(f"{out}-saved", None, 1)
    saved = exported(worker)
    trained(worker, second)
    trained(worker, third)
    resumed = training_worker(folder, **settings)
    resumed.load_checkpoint(f"{out}-saved", None, False)
    loaded = exported(resumed)
    trained(resumed, second)
    trained(resumed, third)
    found = {"saved": saved, "loaded": loaded, "on": exported(worker), "resumed": exported(resumed)}
    torch.save({**found, "steps": [steps(worker), steps(resumed)]}, f"{out}-{os.environ['RANK']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
