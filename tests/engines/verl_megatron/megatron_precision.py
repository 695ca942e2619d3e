"""One rank of verl's Megatron worker in some precision: every kind of region, and the policy against itself."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from verl_megatron import DEFAULTS, training_worker

from support import devices, self_divergence as own
from support.verl_self_divergence import Recording, batch_of, experts_folder, measured

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(folder, out, about, kinds, layout):
    devices.start_process_group()
    if layout.get("moe"):
        folder = experts_folder(Path(out))
    precision, ranks = about["precision"], layout.get("tp", 1)
    # verl's fp16 needs this optimizer. The gradients of single parameters are not read here.
    how = DEFAULTS | {"dtype": DTYPES[precision], "recorded": 2, "distributed_optimizer": True} | layout
    worker = training_worker(folder, how, kind=Recording)
    batch = batch_of(worker, folder)
    # Each tensor-parallel rank searches its own part of the vocabulary for the K most probable ids.
    cells = partial(measured, worker, batch, precision, extra_cells=own.K * (ranks - 1) + 1)
    rows = own.cells(cells, kinds, **about)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
