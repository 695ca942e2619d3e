"""One rank of our verl worker on a batch whose sampler recorded impossible numbers at most tokens, or NaN at a few;
prints what it said."""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_regions import training_worker
from verl_worker import ROWS, as_verl_wants, tokens

import trustrl
from support import regions_oracle as oracle, verl_world as world
from trustrl.engines.verl.worker import RegionWorker


def main(out: str) -> None:
    dist.init_process_group("gloo")
    worker = training_worker(oracle.tiny_model(Path(f"{out}-model")), kind=RegionWorker)
    batch = tokens(0)
    scored = as_verl_wants(batch, compute_loss=False)
    logp = no_padding_2_padding(worker.infer_batch(scored)["log_probs"], scored)
    batch["old_log_probs"] = logp
    batch["advantages"] = torch.randn(ROWS, 1).expand(ROWS, logp.shape[1]).contiguous()
    most = torch.arange(logp.shape[1]) > 1  # answers have 3 or more
    for share, value in ((0.5, -torch.inf), (1.0, 0.5), ("NaN", torch.nan)):
        batch["rollout_log_probs"] = logp.masked_fill(most, value)
        settings = {"max_dropped_share": 1.0 if share == "NaN" else share, "startup_checks": False}
        worker.set_loss_fn(partial(ppo_loss, config=world.actor("trustrl-dppo-binary-tv", policy_loss=settings)))
        data = as_verl_wants(
            batch, global_batch_size=ROWS, mini_batch_size=ROWS, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", trustrl.errors.TrustRLWarning)
            try:
                worker.train_mini_batch(data)
            except trustrl.errors.NonFiniteError as error:
                print(f"RAISED {share}: {error}")
        for one in said:
            print(f"WARNED {share}: {one.message}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
