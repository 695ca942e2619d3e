"""One rank of a real verl training worker on Megatron: every kind of region, its gradient against the oracle's.

    torchrun --nproc-per-node 2 verl_megatron.py RESULT '{"tp": 2}'

Every rank compares the gradient of each of its own parameters with its part of the plain model's. The script takes a
JSON of settings; see `DEFAULTS`. It also runs on GPUs, with transformer-engine: see tests/gpu.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine_workers import TrainingWorkerConfig

from support import devices, megatron_shards as shards, moe_oracle, product_rounding, regions_oracle as oracle
from support.verl_step import as_verl_carries, gradient_of, with_random_routes
from trustrl.engines.verl import RegionWorker, megatron_pass

DEFAULTS = {
    "tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None, "sequence_parallel": True, "packed": True,
    "moe": False, "replay": "disabled", "recompute": False, "tied": False, "layers": 2, "pad_vocabulary": None,
    "micro": 2, "only": None, "unsummed": False, "routed_natively": False,
    "vocabulary": False, "dtype": "float32", "mbridge": True, "recorded": 3, "distributed_optimizer": False,
}  # fmt: skip
"""`only` chooses one case, `vocabulary` those that read more than the sampled token. `recorded` sequences make a
micro-batch of the pass that records π'. The distributed optimizer leaves each replica a part of the gradient. Two controls must fail: `unsummed` leaves out the sum of the hidden states' gradient over
tensor-parallel ranks; `routed_natively` lets the oracle's router choose its own experts under replay."""

WITHOUT_CUDA = dict.fromkeys(
    ("persist_layer_norm", "masked_softmax_fusion", "moe_grouped_gemm", "gradient_accumulation_fusion"), False
)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Moved(RegionWorker):
    """Moves its policy before the first update, as updates before it would have."""

    @torch.no_grad()
    def train_batch(self, data):
        weights = [p for _, _, p in shards.parameters(self.engine)]
        before = [p.clone() for p in weights]
        for p in weights:
            p.mul_(oracle.GROWTH)
        with torch.enable_grad():
            out = super().train_batch(data)
        for p, old in zip(weights, before, strict=True):
            p.copy_(old)
        return out


def training_worker(folder, how, kind=Moved):
    override = {
        "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "sequence_parallel": how["tp"] > 1 and how["sequence_parallel"], **(RECOMPUTE if how["recompute"] else {}),
    }  # fmt: skip
    override |= {"attention_backend": "auto"} if torch.cuda.is_available() else WITHOUT_CUDA
    engine = McoreEngineConfig(
        tensor_model_parallel_size=how["tp"], pipeline_model_parallel_size=how["pp"],
        virtual_pipeline_model_parallel_size=how["vpp"], context_parallel_size=how["cp"],
        expert_model_parallel_size=how["ep"], expert_tensor_parallel_size=how["etp"],
        use_distributed_optimizer=how["distributed_optimizer"],
        vanilla_mbridge=how["mbridge"], use_dynamic_bsz=False,
        micro_batch_size_per_gpu=how["micro"], infer_micro_batch_size_per_gpu=how["recorded"], forward_only=False,
        use_remove_padding=how["packed"], override_transformer_config=override,
    )  # fmt: skip
    object.__setattr__(engine, "dtype", how["dtype"])  # verl's settings allow 16 bits alone; errors of 5e-6 need 32
    object.__setattr__(engine.router_replay, "mode", how["replay"])
    made = kind(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=HFModelConfig(path=folder, use_remove_padding=how["packed"]),
            engine_config=engine, checkpoint_config=None,
            optimizer_config=McoreOptimizerConfig(lr=0.0, total_training_steps=10, lr_decay_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def pad_vocabulary(multiple):
    """Pads the vocabulary as Megatron does for models whose vocabulary its ranks do not divide."""
    from mbridge.core import llm_bridge

    init = llm_bridge.LLMBridge.__init__

    def padding(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.make_vocab_size_divisible_by = multiple

    llm_bridge.LLMBridge.__init__ = padding


def main_gradients(engine):
    return {(stage, name): p.main_grad.float().cpu().clone() for stage, name, p in shards.parameters(engine)}


def leave_out_the_sum():
    """Makes ranks use their own part of the hidden states' gradient: the control."""
    shard = megatron_pass.VocabShard

    def unsummed(group, start, reduce_hidden_gradient):
        return shard(group, start, reduce_hidden_gradient=False)

    megatron_pass.VocabShard = unsummed


def error_over_ranks(found, wanted):
    """‖found − wanted‖ / ‖wanted‖ over the parameters of all ranks."""
    sums = torch.stack([
        torch.stack([(found[key] - part).norm() ** 2 for key, part in wanted.items()]).sum(),
        torch.stack([part.norm() ** 2 for part in wanted.values()]).sum(),
    ])  # fmt: skip
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def model_folder(how):
    folder = [None]
    if dist.get_rank() == 0:
        where = Path(tempfile.mkdtemp())
        if how["moe"]:
            folder = [moe_oracle.tiny_model(where)]
        else:
            folder = [oracle.tiny_model(where, num_hidden_layers=how["layers"], tie_word_embeddings=how["tied"])]
    dist.broadcast_object_list(folder)
    return folder[0]


def main(out, how):
    how, warned = DEFAULTS | how, []
    warnings.showwarning = lambda message, *_: warned.append(str(message))
    devices.start_process_group()
    if how["pad_vocabulary"]:
        pad_vocabulary(how["pad_vocabulary"])
    if how["unsummed"]:
        leave_out_the_sum()
    folder = model_folder(how)
    worker = training_worker(folder, how)
    engine = worker.engine
    replicas, replica = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    carried = as_verl_carries if how["replay"] == "disabled" else with_random_routes(how["routed_natively"])
    results = {}
    for name, case in (oracle.CASES | oracle.TRUNCATED).items():
        needs = case.region.needs()
        if how["only"] not in (None, name) or (how["vocabulary"] and not (needs.topk or needs.full or case.truncated)):
            continue
        batch = oracle.batch(folder, replica, case)
        with product_rounding.watched(megatron_pass) as readings:
            found = gradient_of(
                worker, case.region, batch, case.mode, gradient=main_gradients, carried=carried, **case.settings
            )
        wanted = oracle.expected(folder, replicas, case)
        error = error_over_ranks(found["gradient"], shards.of_rank(engine, wanted.by_name))
        results[name] = {key: found[key] for key in ("keep", "weight", "metrics", "bytes_per_token")}
        results[name] |= {"error": error, "wanted_keep": wanted.keep, "wanted_weight": wanted.weight}
        by_megatron = how["tp"] > 1 and how["sequence_parallel"]
        results[name] |= {"rounding": product_rounding.over_ranks(readings, summed_later=by_megatron)}
    if engine.is_mp_src_rank_with_outputs() and replica == 0:
        Path(out).write_text(json.dumps({"replicas": replicas, "cases": results, "warnings": warned}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(sys.argv[1], json.loads(sys.argv[2]))
