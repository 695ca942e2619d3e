"""One rank of a real verl training worker in some precision: every kind of region, and the policy against itself."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _init_utils as fsdp1
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_regions import training_worker

import trustrl
from support import self_divergence as own, ulysses_attention, verl_world as world
from support.regions_oracle import Batch
from support.verl_step import as_verl_carries
from trustrl.engines.verl import RegionWorker, losses


class Recording(RegionWorker):
    """Records π' for the first update too, which could take it from its own forward pass."""

    _reuses_first_pass = False


def batch_of(worker, folder):
    """This rank's sequences, with the worker's own log-probs for both anchors."""
    tokens = own.tokens(folder, worker.engine.get_data_parallel_rank())
    blank = torch.zeros(tokens.in_loss.shape)
    batch = Batch(
        tokens.prompts, tokens.responses, tokens.in_loss, tokens.in_loss, tokens.advantages, blank, blank, blank,
        tokens.responses.unsqueeze(-1), blank.unsqueeze(-1),
    )  # fmt: skip
    data = as_verl_carries(batch, compute_loss=False)
    kept = {}
    run = worker.engine.infer_batch

    def infer_batch(*args, **kwargs):  # verl returns outputs on one rank of a model-parallel group
        out = run(*args, **kwargs)
        kept.update(out["model_output"])
        return out

    worker.engine.infer_batch = infer_batch
    worker.infer_batch(data)
    del worker.engine.infer_batch
    logp = no_padding_2_padding(kept["log_probs"], data).float()
    return batch._replace(behavior_logp=logp, proximal_logp=logp)


def measured(worker, batch, layout, kind):
    """The policy against itself in one update at learning rate 0; None if the region is refused."""
    region = own.KINDS[kind]
    if region.needs().full and layout.get("strategy") == "fsdp":
        return None
    settings = {"region": trustrl.config_to_dict(region), "startup_checks": False}
    average = "seq-mean-token-mean" if kind in own.PER_SEQUENCE else "token-mean"
    worker.set_loss_fn(partial(ppo_loss, config=world.actor("trustrl", loss_agg_mode=average, policy_loss=settings)))
    rows = len(own.LENGTHS) * worker.engine.get_data_parallel_size()
    data = as_verl_carries(
        batch, bypass=True, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    with own.watched(losses) as seen:
        worker.train_mini_batch(data)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own.measured(seen, layout["precision"], regrouped=layout["recorded_rows"] != 2))
    return own.merged(parts)


def main(folder, out, about, kinds, layout):
    dist.init_process_group("gloo")  # verl would ask for two backends, and both would be the CPU's
    if layout.get("strategy") == "fsdp":
        fsdp1._check_module_states_for_sync_module_states = lambda *_: None
        EngineRegistry.register(model_type="language_model", backend=["fsdp"], device="cpu")(FSDPEngineWithLMHead)
    if "ulysses" in layout:
        ulysses_attention.install()
    layout = {"recorded_rows": 2, "precision": about["precision"]} | layout
    worker = training_worker(folder, kind=Recording, **layout)
    batch = batch_of(worker, folder)
    rows = own.cells(partial(measured, worker, batch, layout), kinds, **about)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
