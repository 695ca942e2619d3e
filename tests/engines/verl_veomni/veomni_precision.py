"""One rank of verl's VeOmni worker in some precision: every kind of region, and the policy against itself."""

import json
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from verl_veomni import DEFAULTS, training_worker

from support import devices, self_divergence as own, veomni_on_cpu
from support.verl_self_divergence import Recording, batch_of, experts_folder, measured

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(folder, out, about, kinds, layout):
    devices.start_process_group()
    veomni_on_cpu.install(DTYPES[about["precision"]])
    if layout.get("moe"):
        folder = experts_folder(Path(out))
    worker = training_worker(folder, DEFAULTS | {"recorded": 2} | layout, kind=Recording)
    batch = batch_of(worker, folder)
    rows = own.cells(partial(measured, worker, batch, about["precision"]), kinds, **about)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
