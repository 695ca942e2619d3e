"""One rank of a real verl training worker, with recording and without: what its losses decided, and its gradients."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import verl_regions as regions
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.verl_step import as_verl_carries
from trustrl.engines.verl import losses


def trained(worker, batch, region, recording, *, steps):
    """Training steps of two epochs with three updates each, at learning rate 0."""
    settings = {"region": trustrl.config_to_dict(region), "startup_checks": False, "recording": recording}
    worker.set_loss_fn(partial(ppo_loss, config=world.actor("trustrl", policy_loss=settings)))
    gradients, seen = [], []
    step, decide = type(worker.engine).optimizer_step, losses.policy_loss

    def watched():
        gradients.append(regions.whole_gradient(worker.engine))
        return step(worker.engine)

    def spied(policy, rollout, *args, **kwargs):
        out = decide(policy, rollout, *args, **kwargs)
        on = rollout.in_loss
        seen.append(
            {
                "policy_logp": policy.logp.detach()[on], "token_id": rollout.token_ids[on], "kept": out.decision.keep[on],
                "behavior_logp": rollout.behavior_logp[on], "proximal_logp": rollout.proximal_logp[on],
                "advantage": rollout.advantage[on], "weight": out.decision.weight[on],
                "divergence_lower": out.decision.divergence.lower[on], "update": len(gradients) % 6 + 0 * on[on].int(),
                "position": rollout.position[on],
            }
        )  # fmt: skip
        return out

    worker.engine.optimizer_step, losses.policy_loss = watched, spied
    rows = len(batch.prompts) * dist.get_world_size()
    for _ in range(steps):
        worker.train_mini_batch(
            as_verl_carries(
                batch, global_batch_size=rows // 3, mini_batch_size=rows // 3, epochs=2, seed=0,
                dataloader_kwargs={"shuffle": True},
            )
        )  # fmt: skip
    losses.policy_loss = decide
    return {"gradients": gradients, "seen": {name: torch.cat([part[name] for part in seen]) for name in seen[0]}}


def main(folder, out):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    worker = regions.training_worker(folder)
    batch, region = oracle.batch(folder, rank), oracle.CASES["binary on μ"].region
    fires = {"kind": "quantile-above", "of": "log_ratio", "level": 0.0, "at_most_every": 2}
    recording = {"folder": f"{out}/records", "sample": 1.0, "ring_steps": 1, "triggers": [fires]}
    found = {name: trained(worker, batch, region, given, steps=2) for name, given in (("off", None), ("on", recording))}
    torch.save(found, f"{out}/found-{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
