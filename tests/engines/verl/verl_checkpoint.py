"""A verl worker's checkpoint, saved with one region and loaded with the same and with another: what is said, as JSON."""

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
import verl_regions as regions
from verl.trainer.config import CheckpointConfig
from verl.workers.utils.losses import ppo_loss

from support import verl_world as world
from trustrl.engines.verl import RegionWorker
from trustrl.errors import TrustRLWarning


def use(worker, loss_mode):
    worker.set_loss_fn(partial(ppo_loss, config=world.actor(loss_mode)))


def loaded(worker, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.load_checkpoint(folder)
    return [str(one.message) for one in caught if issubclass(one.category, TrustRLWarning)]


def main(model, folder):
    dist.init_process_group("gloo")
    worker = regions.training_worker(model, kind=RegionWorker, checkpoint=CheckpointConfig())
    use(worker, "trustrl-dppo-binary-tv")
    synced = []
    worker._recorder = SimpleNamespace(sync=lambda: synced.append(len([*Path(folder).rglob("*.pt")])))
    worker.save_checkpoint(folder, global_step=4)
    assert synced == [0], "the record must be on the disk before the checkpoint"
    said = {"the same": loaded(worker, folder)}
    use(worker, "trustrl-ppo")
    said["another"] = loaded(worker, folder)
    use(worker, "vanilla")
    said["none"] = loaded(worker, folder)
    if dist.get_rank() == 0:
        Path(folder, "said.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
