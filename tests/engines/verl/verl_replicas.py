"""One rank of a verl training worker whose sequences come from three replicas, one of which misses a weight sync."""

import os
import sys
import warnings
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import verl_regions as regions
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.verl import RegionWorker, anchors
from trustrl.errors import EngineError

STEPS, FROZEN, COPIES = 6, 3, 12
"""`b` keeps the weights of step 3. In the last step, `c` is just as old, and says so."""

ON_RANK = {0: ("a", "b"), 1: ("b", "c")}


def carried(batch, rank):
    rows = len(batch.prompts)
    whole = rows * dist.get_world_size()
    data = as_verl_carries(
        batch, global_batch_size=whole // 2, mini_batch_size=whole // 2, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": True},
    )  # fmt: skip
    names = [ON_RANK[rank][row % 2] for row in range(rows)]
    return data, names


def log_probs(worker, data):
    """The trainer's at its current weights, one row per sequence."""
    return [row.clone() for row in anchors.record(worker, data, distribution=False)["trustrl_logp"].unbind()]


def trained(folder, rank, recording, **settings):
    batch = oracle.batch(folder, rank)
    parts = {name: x.repeat(COPIES, *[1] * (x.ndim - 1)) for name, x in batch._asdict().items() if torch.is_tensor(x)}
    batch = batch._replace(**parts)
    worker = regions.training_worker(folder, kind=RegionWorker, learning_rate=3e-3)
    policy_loss = {"region": trustrl.config_to_dict(trustrl.preset("dppo-binary-tv")), "recording": recording}
    worker.set_loss_fn(partial(ppo_loss, config=world.actor("trustrl", policy_loss=policy_loss | settings)))
    noise = torch.Generator().manual_seed(rank)
    old, found = [], []
    for step in range(1, STEPS + 1):
        worker.weights_sent(step - 1)
        data, names = carried(batch, rank)
        now = log_probs(worker, data)
        old = now if step <= FROZEN else old
        drawn, fields = [], []
        for row, name in enumerate(names):
            stale = name == "b" or (name == "c" and step == STEPS)
            logp = old[row] if stale else now[row]
            drawn.append(logp + 0.004 * torch.randn(logp.shape, generator=noise))
            version = FROZEN - 1 if name == "c" and step == STEPS else step - 1
            fields.append({REPLICA: name, anchors.REQUESTS: np.array([[0, len(logp), version]], np.int32)})
        data["rollout_log_probs"] = torch.nested.as_nested_tensor(drawn, layout=torch.jagged)
        data.update(tu.get_tensordict({"extra_fields": fields}))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                metrics = tu.get(worker.train_mini_batch(data), "metrics")
            except EngineError as error:
                found.append({"raised": str(error)})
                break
        heard = [str(one.message) for one in said if "stands out" in str(one.message)]
        found.append({"said": heard, **{name: metrics[name] for name in metrics if "replica" in name}})
    return found


def main(folder, out):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    found = {"warn": trained(folder, rank, {"folder": f"{out}/records", "sample": 1.0})}
    found["raise"] = trained(folder, rank, None, on_stale_replica="raise")
    torch.save(found, f"{out}/found-{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
