"""One rank of a real verl training worker that updates on 1, 2 or 4 mini-batches, with π' from a pass and from the update.

Every run starts from the same weights. The gradient of each update, its verdicts and the sequences that the model saw
go to a file.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss
from verl_regions import training_worker, whole_gradient

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.verl import RegionWorker, losses

CASES = (
    "binary on π', bypassed", "top-K on π'", "TROLL on π'", "exact TV on π'", "both anchors, bypassed",
    "TROLL on π', truncated",
)  # fmt: skip
LEARNING_RATE = 2e-4


class Separate(RegionWorker):
    """Records π' of every sequence in a pass without gradient."""

    _reuses_first_pass = False


def batch_of(folder, case, rows):
    """The oracle's batch, repeated to so many rows."""
    batch = oracle.batch(folder, int(os.environ["RANK"]), case)
    at = torch.arange(rows) % len(batch.prompts)
    return type(batch)(*(x if x is None else x[at] for x in batch))


def run(worker, folder, case, mini_batches, *, shuffle):
    """Returns what one training step did, and puts the weights back."""
    settings = {"region": trustrl.config_to_dict(case.region), "startup_checks": True}
    if case.truncated:
        settings["max_kept"] = oracle.VOCABULARY
    config = world.actor("trustrl", loss_agg_mode=case.mode, policy_loss=settings)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    before = [p.detach().clone() for p in worker.engine.module.parameters()]
    gradients, keep, seen = [], [], {"with gradient": 0, "without": 0}
    step, decide = type(worker.engine).optimizer_step, losses.policy_loss
    worker.engine.optimizer_step = lambda: (gradients.append(whole_gradient(worker.engine)), step(worker.engine))[1]

    def watched(policy, rollout, *args, **kwargs):
        out = decide(policy, rollout, *args, **kwargs)
        keep.append(out.decision.keep[rollout.in_loss])
        return out

    def count(module, args, kwargs):
        seen["with gradient" if torch.is_grad_enabled() else "without"] += len(kwargs["input_ids"])

    losses.policy_loss = watched
    hook = worker.engine.module.register_forward_pre_hook(count, with_kwargs=True)
    rows = 24  # a pass without gradient takes 3 at a time, an update 2
    data = as_verl_carries(
        batch_of(folder, case, rows), global_batch_size=rows * dist.get_world_size(), epochs=1, seed=3,
        mini_batch_size=rows * dist.get_world_size() // mini_batches, dataloader_kwargs={"shuffle": shuffle},
        bypass=case.settings.get("bypass", False),
    )  # fmt: skip
    out = worker.train_mini_batch(data)
    hook.remove()
    losses.policy_loss = decide
    with torch.no_grad():
        for p, old in zip(worker.engine.module.parameters(), before, strict=True):
            p.copy_(old)
    return {"gradients": gradients, "keep": keep, "seen": seen, "metrics": dict(tu.get(out, "metrics"))}


def main(folder, out):
    dist.init_process_group("gloo")
    found = {}
    workers = {
        "update": training_worker(folder, kind=RegionWorker, learning_rate=LEARNING_RATE),
        "pass": training_worker(folder, kind=Separate, learning_rate=LEARNING_RATE),
    }
    for name in CASES:
        case = (oracle.CASES | oracle.TRUNCATED)[name]
        for mini_batches in (1, 2, 4):
            for how, worker in workers.items():
                found[name, mini_batches, how] = run(worker, folder, case, mini_batches, shuffle=mini_batches == 4)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
