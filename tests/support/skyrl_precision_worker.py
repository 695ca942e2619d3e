"""One rank of SkyRL's policy worker in some precision: Top-K regions and TROLL, and the policy against itself."""

import json
import os
import sys
from pathlib import Path

from support import skyrl_on_cpu

skyrl_on_cpu.install()

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.config import make_config
from skyrl.train.config.config import MixedPrecisionConfig

from support import self_divergence as own
from trustrl.engines import skyrl as engine
from trustrl.engines.skyrl import losses
from trustrl.engines.skyrl.vocabulary_worker import RegionPolicyWorkerBase, joined
from trustrl.regions.loading import config_to_dict

ROWS = 2
"""Sequences of a micro-batch, in the recording pass and in the update."""


def worker_of(folder, precision):
    """SkyRL's worker with its own model, optimizer and FSDP2, which computes in this precision."""
    trainer = make_config(algorithm_cls=engine.RegionAlgorithmConfig)().trainer
    trainer.policy.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype=precision)
    trainer.flash_attn = trainer.remove_microbatch_padding = False
    trainer.micro_train_batch_size_per_gpu = trainer.micro_forward_batch_size_per_gpu = ROWS
    trainer.algorithm = algorithm("Top-K TV")
    worker = RegionPolicyWorkerBase(
        cfg=trainer, world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]), local_rank=0,
        master_addr=os.environ["MASTER_ADDR"], master_port=os.environ["MASTER_PORT"], sequence_parallel_size=1,
    )  # fmt: skip
    worker.init_worker_process_group()
    worker.init_model(folder)
    return worker


def algorithm(kind):
    return engine.RegionAlgorithmConfig(
        policy_loss_type="trustrl",
        region=config_to_dict(own.KINDS[kind]),
        temperature=own.TEMPERATURE,
        use_kl_loss=False,
    )


def measured(worker, folder, precision, kind):
    """The policy against itself in one update, or None for regions that run in SkyRL's own worker."""
    if not own.KINDS[kind].needs().topk:
        return None
    worker.cfg.algorithm = algorithm(kind)
    worker._needs = own.KINDS[kind].needs()
    tokens = own.tokens(folder, worker._rank)
    mask = tokens.in_loss.long()
    data = TrainingInputBatch(
        {
            "sequences": torch.cat([tokens.prompts, tokens.responses], 1),
            "attention_mask": torch.cat([torch.ones_like(tokens.prompts), mask], 1),
        }
    )
    data.metadata = {"response_length": mask.shape[1]}
    output = worker.forward(data)
    logp = torch.tensor([row["logprobs"] for row in output.loss_fn_outputs])
    data |= {"response_mask": mask, "loss_mask": mask, "advantages": tokens.advantages, "action_log_probs": logp}
    data |= {losses.FACTOR: torch.ones_like(logp), **joined(output.loss_fn_outputs, len(data))}
    with own.watched(losses) as seen:
        worker.forward_backward(data)
    return own.measured(seen, precision)


def main(folder, out, about, kinds, settings):
    about = json.loads(about)
    engine.register()
    worker = worker_of(folder, about["precision"])
    rows = own.cells(lambda kind: measured(worker, folder, about["precision"], kind), json.loads(kinds), **about)
    if worker._rank == 0:
        Path(out).write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
