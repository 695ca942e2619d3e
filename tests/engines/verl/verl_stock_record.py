"""One rank of a verl training worker with verl's own loss: verl's class, and ours with and without a record."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import verl_regions as regions
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils import losses as verls

from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.common.stock_tokens import FOLDER, REGION, SAMPLE
from trustrl.engines.verl import RegionWorker

STEPS = 2


def carried(batch, rank, step):
    """A batch as verl's trainer sends it, with what the trainer knows about each sequence."""
    rows = len(batch.prompts)
    whole = rows * dist.get_world_size()
    data = as_verl_carries(
        batch, global_batch_size=whole // 3, mini_batch_size=whole // 3, epochs=2, seed=0,
        dataloader_kwargs={"shuffle": True}, calculate_entropy=True,
    )  # fmt: skip
    scores = torch.zeros_like(data["response_mask"].values(), dtype=torch.float32)
    scores[data["response_mask"].offsets()[1:] - 1] = torch.arange(rows) / rows + rank
    data["rm_scores"] = torch.nested.nested_tensor_from_jagged(scores, data["response_mask"].offsets())
    names = {
        "uid": [f"{step}-{rank}-{row // 2}" for row in range(rows)],
        "data_source": ["sums"] * rows,
        "extra_info": [{"index": row} for row in range(rows)],
        "extra_fields": [{"reward_extra_info": {"right": row % 2, "comment": "a text"}} for row in range(rows)],
    }
    data.update(tu.get_tensordict(names))
    return data


def trained(folder, batch, rank, kind):
    """Steps of two epochs with three updates each."""
    worker = regions.training_worker(folder, kind=kind, learning_rate=1e-2)
    config = world.actor("vanilla")
    worker.set_loss_fn(partial(verls.ppo_loss, config=config))
    gradients, seen, metrics = [], [], []
    step, find = type(worker.engine).optimizer_step, verls.get_policy_loss_fn

    def watched():
        gradients.append(regions.whole_gradient(worker.engine))
        return step(worker.engine)

    def spied(name):
        loss = find(name)

        def called(**given):
            on = given["response_mask"]
            seen.append({key: given[key].detach()[on] for key in ("old_log_prob", "log_prob", "advantages")})
            return loss(**given)

        return called

    worker.engine.optimizer_step, verls.get_policy_loss_fn = watched, spied
    for at in range(STEPS):
        metrics.append(tu.get(worker.train_mini_batch(carried(batch, rank, at)), "metrics"))
    verls.get_policy_loss_fn = find
    kept = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "grad_norm", "actor/entropy_loss")
    return {
        "gradients": gradients,
        "weights": torch.cat([p.full_tensor().detach().flatten() for p in worker.engine.module.parameters()]),
        "seen": {name: torch.cat([part[name] for part in seen]) for name in seen[0]},
        "metrics": [{name: str(one[name]) for name in kept} for one in metrics],
    }


class Perturbed(RegionWorker):
    """The control: its third update differs in the last bits of the advantages."""

    updates = 0

    def train_batch(self, data):
        self.updates += 1
        if self.updates == 3:
            data["advantages"] = data["advantages"] * (1 + 2**-20)
        return super().train_batch(data)


def main(folder, out):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    batch = oracle.batch(folder, rank)
    found = {"verl": trained(folder, batch, rank, TrainingWorker), "ours": trained(folder, batch, rank, RegionWorker)}
    os.environ |= {FOLDER: f"{out}/records", SAMPLE: "1"}
    found["recorded"] = trained(folder, batch, rank, RegionWorker)
    os.environ |= {FOLDER: f"{out}/observed", REGION: "dppo-binary-tv"}
    found["observed"] = trained(folder, batch, rank, RegionWorker)
    os.environ |= {FOLDER: f"{out}/perturbed"}
    found["perturbed"] = trained(folder, batch, rank, Perturbed)
    torch.save(found, f"{out}/found-{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
