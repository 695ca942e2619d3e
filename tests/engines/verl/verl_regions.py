"""One rank of a real verl training worker (FSDP2, no Ray): every kind of region, its gradient to a file.

The policy is moved right after the worker has recorded what it records: all weights grow by a factor. So both anchors,
the policy and their gradients are known from two plain models (`regions_oracle`).
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils as fsdp1
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorkerConfig

from support import devices, regions_oracle as oracle, ulysses_attention
from support.verl_step import gradient_of
from trustrl.engines.verl import RegionWorker


class Moved(RegionWorker):
    """Moves its policy before the first update, as updates before it would have. So its first pass is not π'."""

    _reuses_first_pass = False

    @torch.no_grad()
    def train_batch(self, data):
        if isinstance(self.engine.module, FSDPModule):
            self.engine.module.reshard()  # a forward pass leaves the gathered weights of the root behind
        before = [p.detach().clone() for p in self.engine.module.parameters()]
        for p in self.engine.module.parameters():
            p.mul_(oracle.GROWTH)
        with torch.enable_grad():
            out = super().train_batch(data)
        for p, old in zip(self.engine.module.parameters(), before, strict=True):
            p.copy_(old)
        return out


def training_worker(
    folder,
    strategy="fsdp2",
    remove_padding=False,
    checkpointing=False,
    lora_rank=0,
    ulysses=1,
    kind=Moved,
    checkpoint=None,
    learning_rate=0.0,
    precision="fp32",
    recorded_rows=3,
    attention="eager",
):
    engine = FSDPEngineConfig(
        strategy=strategy, fsdp_size=dist.get_world_size(), use_orig_params=strategy == "fsdp", use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_torch_compile=False,
        infer_micro_batch_size_per_gpu=recorded_rows, use_remove_padding=remove_padding, forward_only=False,
        ulysses_sequence_parallel_size=ulysses,
        mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )  # fmt: skip
    model = HFModelConfig(
        path=folder, use_remove_padding=remove_padding, enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": attention if ulysses == 1 else ulysses_attention.NAME}, lora_rank=lora_rank, lora_alpha=16,
        target_modules="all-linear",
    )  # fmt: skip
    made = kind(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, checkpoint_config=checkpoint,
            optimizer_config=FSDPOptimizerConfig(lr=learning_rate, total_training_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def whole_gradient(engine):
    """By all trained parameters, over all ranks."""
    module = engine.module
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad]).cpu()
    return torch.cat([p.grad.full_tensor().flatten() for p in module.parameters() if p.requires_grad]).cpu()


def main(folder, out, how):
    rank = int(os.environ["RANK"])
    devices.start_process_group()  # on a CPU, verl would ask for two backends, and both would be the CPU's
    if how.get("strategy") == "fsdp":  # verl's default on GPUs; on a CPU torch would refuse to broadcast the weights
        fsdp1._check_module_states_for_sync_module_states = lambda *_: None
        EngineRegistry.register(model_type="language_model", backend=["fsdp"], device="cpu")(FSDPEngineWithLMHead)
    if "ulysses" in how:
        ulysses_attention.install()
    worker = training_worker(folder, **how)
    replica = worker.engine.get_data_parallel_rank()
    found = {}
    for name, case in (oracle.LOOSE if "lora_rank" in how else oracle.CASES | oracle.TRUNCATED).items():
        if case.region.needs().full and how.get("strategy") == "fsdp":
            continue  # refused
        batch = oracle.batch(folder, replica, case)
        found[name] = gradient_of(worker, case.region, batch, case.mode, gradient=whole_gradient, **case.settings)
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
