"""One rank of a real verl training worker in some precision: every kind of region, and the policy against itself."""

import json
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.fsdp import _init_utils as fsdp1
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl_regions import training_worker

from support import devices, self_divergence as own, ulysses_attention
from support.verl_self_divergence import Recording, batch_of, measured


def measured_on(worker, batch, layout, kind):
    """The policy against itself; None if the region is refused."""
    if own.KINDS[kind].needs().full and layout.get("strategy") == "fsdp":
        return None
    return measured(worker, batch, layout["precision"], kind, regrouped=layout["recorded_rows"] != 2)


def main(folder, out, about, kinds, layout):
    devices.start_process_group()
    if layout.get("strategy") == "fsdp":
        fsdp1._check_module_states_for_sync_module_states = lambda *_: None
        EngineRegistry.register(model_type="language_model", backend=["fsdp"], device="cpu")(FSDPEngineWithLMHead)
    if "ulysses" in layout:
        ulysses_attention.install()
    layout = {"recorded_rows": 2, "precision": about["precision"]} | layout
    worker = training_worker(folder, kind=Recording, **layout)
    batch = batch_of(worker, folder)
    rows = own.cells(partial(measured_on, worker, batch, layout), kinds, **about)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
