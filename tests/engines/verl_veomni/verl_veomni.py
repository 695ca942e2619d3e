"""One rank of a real verl training worker on VeOmni: every kind of region, its gradient against the oracle's.

    torchrun --nproc-per-node 2 verl_veomni.py RESULT '{"expert_parallel": 2, "moe": true}'

The script takes a JSON of settings; see `DEFAULTS`. VeOmni shards every model, so it needs two ranks.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from veomni.distributed.parallel_state import get_parallel_state
from verl.workers.config import HFModelConfig, VeOmniEngineConfig, VeOmniOptimizerConfig
from verl.workers.engine_workers import TrainingWorkerConfig

from support import moe_oracle, regions_oracle as oracle, veomni_on_cpu, verl_world as world
from support.verl_step import as_verl_carries, gradient_of, with_random_routes
from trustrl.engines.verl import RegionWorker

DEFAULTS = {
    "ulysses": 1, "expert_parallel": 1, "packed": True, "recompute": False, "moe": False, "replay": "disabled",
    "routed_natively": False, "only": None, "recorded": 3,
}  # fmt: skip
"""`only` chooses one case. `recorded` sequences make a micro-batch of the pass that records π'. `routed_natively` is a control that must fail: the oracle's router chooses its own experts
under replay."""


class Moved(RegionWorker):
    """Moves its policy before the first update, as updates before it would have."""

    @torch.no_grad()
    def train_batch(self, data):
        module = self.engine.module
        module.reshard()  # a forward pass leaves the gathered weights of the root behind
        before = [p.detach().clone() for p in module.parameters()]
        for p in module.parameters():
            p.mul_(oracle.GROWTH)
        with torch.enable_grad():
            out = super().train_batch(data)
        for p, old in zip(module.parameters(), before, strict=True):
            p.copy_(old)
        return out


def training_worker(folder, how, kind=Moved):
    experts = veomni_on_cpu.EXPERTS if how["expert_parallel"] > 1 else "eager"
    engine = VeOmniEngineConfig(
        ulysses_parallel_size=how["ulysses"], expert_parallel_size=how["expert_parallel"], mixed_precision=True,
        attn_implementation=veomni_on_cpu.ATTENTION if how["ulysses"] > 1 else "eager", moe_implementation=experts,
        use_remove_padding=how["packed"], use_dynamic_bsz=False, micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=how["recorded"], use_torch_compile=False, forward_only=False,
    )  # fmt: skip
    object.__setattr__(engine.router_replay, "mode", how["replay"])
    model = HFModelConfig(
        path=folder, use_remove_padding=how["packed"], enable_gradient_checkpointing=how["recompute"],
        override_config={"attn_implementation": "eager"},
    )  # fmt: skip
    made = kind(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, checkpoint_config=None,
            optimizer_config=VeOmniOptimizerConfig(lr=0.0, total_training_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def whole_gradient(engine):
    """By all parameters, over all ranks."""
    state = get_parallel_state()
    parts = []
    for name, p in engine.module.named_parameters():
        whole = p.grad.full_tensor()
        if state.ep_enabled and ".experts." in name:  # VeOmni cuts experts by hand, outside the DTensor
            ranks = [torch.empty_like(whole) for _ in range(state.ep_size)]
            dist.all_gather(ranks, whole.contiguous(), group=state.ep_group)
            whole = torch.cat(ranks)
        parts.append(whole.flatten())
    return torch.cat(parts)


def model_folder(how):
    folder = [None]
    if dist.get_rank() == 0:
        folder = [(moe_oracle if how["moe"] else oracle).tiny_model(Path(tempfile.mkdtemp()))]
    dist.broadcast_object_list(folder)
    return folder[0]


def main(out, how):
    how = DEFAULTS | how
    dist.init_process_group("gloo")
    veomni_on_cpu.install()
    folder = model_folder(how)
    worker = training_worker(folder, how)
    engine = worker.engine
    replicas, replica = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    carried = as_verl_carries if how["replay"] == "disabled" else with_random_routes(how["routed_natively"])
    results = {}
    for name, case in (oracle.CASES | oracle.TRUNCATED).items():
        if how["only"] not in (None, name):
            continue
        batch = oracle.batch(folder, replica, case)
        found = gradient_of(
            worker, case.region, batch, case.mode, gradient=whole_gradient, carried=carried, **case.settings
        )
        if dist.get_rank() == 0:
            wanted = oracle.expected(folder, replicas, case)
            results[name] = {key: found[key] for key in ("keep", "weight", "metrics", "bytes_per_token")}
            results[name] |= {"error": world.error(found["gradient"], wanted.gradient), "wanted": wanted.metrics}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"replicas": replicas, "cases": results}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
