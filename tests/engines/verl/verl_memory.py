"""One measured training step of a verl worker, in a process of its own: `verl_memory.py PRESET` prints bytes as JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import verl_regions as regions

from support import step_memory
from trustrl.engines.verl import RegionWorker


def main(name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        worker = regions.training_worker(step_memory.model(Path(folder)), kind=RegionWorker)
    worker.engine_config.infer_micro_batch_size_per_gpu = 1
    used = step_memory.peak(worker, name)
    gradients = sum(p.numel() * p.element_size() for p in worker.engine.module.parameters())
    print(json.dumps({"peak": used, "gradients": gradients}))


if __name__ == "__main__":
    main(*sys.argv[1:])
