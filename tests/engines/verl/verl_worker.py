"""One rank of verl's own training worker (FSDP2, no Ray), which knows nothing of us: two losses' gradients on the same tokens."""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding
from verl_regions import training_worker

from support import regions_oracle as oracle, verl_world as world

PROMPT, RESPONSE, ROWS = 4, 12, 6


def tokens(rank: int) -> dict[str, torch.Tensor]:
    """Each rank's own; the last one has a micro-batch without a single token in the loss."""
    torch.manual_seed(10 + rank)
    ids = torch.randint(3, oracle.VOCABULARY, (ROWS, PROMPT + RESPONSE))
    lengths = torch.randint(3, RESPONSE + 1, (ROWS,))
    response = (torch.arange(RESPONSE) < lengths.unsqueeze(1)).long()
    attention = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), response], dim=1)
    in_loss = response.clone()
    if rank == dist.get_world_size() - 1:
        in_loss[:2] = 0
    return {
        "input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": attention,
        "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1), "response_mask": in_loss,
    }  # fmt: skip


def as_verl_wants(batch: dict[str, torch.Tensor], **meta) -> object:
    usual = {"temperature": 1.0, "global_token_num": batch["attention_mask"].sum(-1).tolist()}
    return left_right_2_no_padding(DataProto.from_single_dict(dict(batch), meta_info=usual | meta).to_tensordict())


def gradient_of(worker: TrainingWorker, loss_mode: str, batch: dict[str, torch.Tensor], mode: str, **more) -> dict:
    """One optimiser step at learning rate 0, and the gradient it would have used."""
    config = world.actor(loss_mode, loss_agg_mode=mode, **more)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    kept = []
    step = type(worker.engine).optimizer_step

    def watched() -> object:
        kept.append(torch.cat([p.grad.full_tensor().flatten() for p in worker.engine.module.parameters()]))
        return step(worker.engine)

    worker.engine.optimizer_step = watched
    rows = ROWS * dist.get_world_size()
    out = worker.train_mini_batch(
        as_verl_wants(
            batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
        )
    )
    (gradient,) = kept
    return {"gradient": gradient, "metrics": tu.get(out, "metrics") if out is not None else None}


def main(out: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # verl would ask for two backends, and both would be the CPU's
    folder = f"{out}-model-{rank}"
    worker = training_worker(oracle.tiny_model(Path(folder)), kind=TrainingWorker)
    batch = tokens(rank)
    scored = as_verl_wants(batch, compute_loss=False)
    logp = no_padding_2_padding(worker.infer_batch(scored)["log_probs"], scored)
    batch["old_log_probs"] = (logp + 0.5 * torch.randn_like(logp)).clamp(max=-1e-4)
    batch["advantages"] = torch.randn(ROWS, 1).expand(ROWS, RESPONSE).contiguous()
    region = {"divergence": {"max_decrease": 0.01, "max_increase": 0.02}}
    bounds = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1e6}
    found = {}
    for mode in world.MODES:
        found[mode] = (
            gradient_of(worker, "trustrl-dppo-binary-tv", batch, mode, policy_loss={"region": region}),
            gradient_of(worker, "dppo_tv", batch, mode, **bounds),
        )
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
