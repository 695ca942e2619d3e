"""A verl worker's policy against itself, on any of verl's engines. `support.self_divergence` has the measure."""

from functools import partial

import torch
import torch.distributed as dist
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

import trustrl
from support import self_divergence as own, verl_world as world
from support.regions_oracle import Batch
from support.verl_step import as_verl_carries
from trustrl.engines.verl import RegionWorker, losses


class Recording(RegionWorker):
    """Records π' for the first update too, which could take it from its own forward pass."""

    _reuses_first_pass = False


def experts_folder(out):
    """Saves a mixture of experts next to the file of results, once for all ranks, and returns its folder."""
    folder = out.with_name("experts")
    if dist.get_rank() == 0:
        folder.mkdir()
        own.model_folder(folder, experts=4)
    dist.barrier()
    return str(folder)


def batch_of(worker, folder):
    """This rank's sequences, with the worker's own log-probs for both anchors; 0 on a stage that computes none."""
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
        kept.update(out.get("model_output", {}))
        return out

    worker.engine.infer_batch = infer_batch
    worker.infer_batch(data)
    del worker.engine.infer_batch
    if not kept:
        return batch
    logp = no_padding_2_padding(kept["log_probs"].cpu(), data).float()
    return batch._replace(behavior_logp=logp, proximal_logp=logp)


def measured(worker, batch, precision, kind, **how):
    """The policy against itself in one update at learning rate 0, over all ranks. `how` goes to `own.measured`."""
    settings = {"region": trustrl.config_to_dict(own.KINDS[kind]), "startup_checks": False}
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
    dist.all_gather_object(parts, own.measured(seen, precision, **how) if seen else None)
    return own.merged([part for part in parts if part is not None])
