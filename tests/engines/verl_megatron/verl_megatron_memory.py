"""One measured training step on Megatron, tensor parallel 2: `verl_megatron_memory.py PRESET` prints bytes as JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import verl_megatron as megatron

from support import step_memory
from trustrl.engines.verl import RegionWorker


def main(name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [step_memory.model(Path(tempfile.mkdtemp())) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    worker = megatron.training_worker(folder[0], megatron.DEFAULTS | {"tp": 2}, kind=RegionWorker)
    worker.engine_config.infer_micro_batch_size_per_gpu = 1
    used = step_memory.peak(worker, name)
    if dist.get_rank() == 0:
        print(json.dumps(used))


if __name__ == "__main__":
    main(*sys.argv[1:])
