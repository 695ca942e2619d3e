"""One rank of a real verl training worker (FSDP2, no Ray): every kind of region, its gradient to a file.

The policy is moved right after the worker has recorded what it records: all weights grow by a factor. So both anchors,
the policy and their gradients are known from two plain models (`regions_oracle`).
"""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils as fsdp1
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import regions_oracle as oracle, verl_world as world
from trustrl.engines.verl import RegionWorker, anchors, losses


class Moved(RegionWorker):
    """Moves its policy before the first update, as updates before it would have."""

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
    folder, strategy="fsdp2", remove_padding=False, checkpointing=False, lora_rank=0, kind=Moved, checkpoint=None
):
    engine = FSDPEngineConfig(
        strategy=strategy, fsdp_size=dist.get_world_size(), use_orig_params=strategy == "fsdp", use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_torch_compile=False,
        infer_micro_batch_size_per_gpu=3, use_remove_padding=remove_padding, forward_only=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )  # fmt: skip
    model = HFModelConfig(
        path=folder, use_remove_padding=remove_padding, enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": "eager"}, lora_rank=lora_rank, lora_alpha=16,
        target_modules="all-linear",
    )  # fmt: skip
    made = kind(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, checkpoint_config=checkpoint,
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def as_verl_carries(batch, **meta):
    """Nested responses, as they come out of verl's queue."""
    lengths = batch.in_sequence.sum(-1).tolist()
    rows = range(len(lengths))

    def nested(x):
        return torch.nested.as_nested_tensor([x[row, : lengths[row]] for row in rows], layout=torch.jagged)

    ids = [torch.cat([batch.prompts[row], batch.responses[row, : lengths[row]]]) for row in rows]
    tensors = {
        "prompts": torch.nested.as_nested_tensor(list(batch.prompts), layout=torch.jagged),
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(len(x)) for x in ids], layout=torch.jagged),
        "responses": nested(batch.responses),
        "response_mask": nested(batch.in_loss.long()),
        "loss_mask": nested(batch.in_loss.long()),
        "advantages": nested(batch.advantages),
        "rollout_log_probs": nested(batch.behavior_logp),
        "old_log_probs": nested(batch.behavior_logp if meta.pop("bypass", False) else batch.proximal_logp),
        "ref_log_prob": nested(batch.reference_logp),
        "teacher_ids": nested(batch.behavior_top_ids),
        "teacher_logprobs": nested(batch.behavior_top_logp),
    }
    usual = {"temperature": oracle.TEMPERATURE, "calculate_entropy": False}
    return tu.get_tensordict(tensors, non_tensor_dict=usual | meta)


def whole_gradient(module):
    """By all trained parameters, over all ranks."""
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])
    return torch.cat([p.grad.full_tensor().flatten() for p in module.parameters() if p.requires_grad])


def gradient_of(worker, region, batch, mode, *, carried=as_verl_carries, **more):
    """One optimiser step at learning rate 0, and the gradient it would have used."""
    settings = {"region": trustrl.config_to_dict(region), "startup_checks": False}
    meta = {key: more.pop(key) for key in ("bypass", "calculate_entropy") if key in more}
    config = world.actor("trustrl", loss_agg_mode=mode, policy_loss=settings, **more)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    kept = []
    step = type(worker.engine).optimizer_step

    def watched():
        kept.append(whole_gradient(worker.engine.module))
        return step(worker.engine)

    worker.engine.optimizer_step = watched
    keep, weight = [], []
    decide = losses.policy_loss

    def seen(policy, rollout, *args, **kwargs):
        out = decide(policy, rollout, *args, **kwargs)
        keep.extend(out.decision.keep[rollout.in_loss].tolist())
        weight.extend(out.decision.weight[rollout.in_loss].tolist())
        return out

    losses.policy_loss = seen
    record, fields = anchors.record, {}

    def recorded(*args, **kwargs):
        fields.update(record(*args, **kwargs))
        return fields

    anchors.record = recorded
    rows = len(batch.prompts) * dist.get_world_size()
    out = worker.train_mini_batch(
        carried(
            batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
            dataloader_kwargs={"shuffle": False}, **meta,
        )
    )  # fmt: skip
    losses.policy_loss, anchors.record = decide, record
    (gradient,) = kept
    num_tokens = int(batch.in_sequence.sum())
    num_bytes = sum(x.values().nbytes for x in fields.values()) / num_tokens
    metrics = dict(tu.get(out, "metrics"))
    return {"gradient": gradient, "metrics": metrics, "keep": keep, "weight": weight, "bytes_per_token": num_bytes}


def main(folder, out, how):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # verl would ask for two backends, and both would be the CPU's
    if how.get("strategy") == "fsdp":  # verl's default on GPUs; on a CPU torch would refuse to broadcast the weights
        fsdp1._check_module_states_for_sync_module_states = lambda *_: None
        EngineRegistry.register(model_type="language_model", backend=["fsdp"], device="cpu")(FSDPEngineWithLMHead)
    worker = training_worker(folder, **how)
    found = {}
    for name, case in (oracle.LOOSE if "lora_rank" in how else oracle.CASES).items():
        if case.region.needs().full and how.get("strategy") == "fsdp":
            continue  # refused
        batch = oracle.batch(folder, rank, same=case.same_on_rank == rank)
        found[name] = gradient_of(worker, case.region, batch, case.mode, **case.settings)
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
