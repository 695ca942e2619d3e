"""A mixture of experts through every way of new weights, in a process of its own; prints one JSON object.

vLLM makes its group of experts when the first engine of a process is built, and none if that one is dense.
"""

import json
import os
import sys

from trustrl.engines.vllm import set_cpu_environment

if __name__ == "__main__":  # importing this file must change nothing
    set_cpu_environment()

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from support.rendezvous import free_port
from support.tiny_models import LONGEST, logps, perturb, save_model, some_sequences
from trustrl.engines.vllm import cpu_options, extra_llm_options, install_sync, score, weight_reload as reload_module
from trustrl.engines.vllm.clients import LocalClient
from trustrl.engines.vllm.gloo_transfer import BACKEND, GlooTrainerInitInfo
from trustrl.engines.vllm.weight_reload import begin_reload, end_reload, forget_prefixes, model_runner_of, reloaded

SEQUENCES = some_sequences(12, 30)
OPTIONS = cpu_options(dtype="float32", kv_cache_memory_bytes=1 << 26)


def gap(llm, model):
    scores = score(llm, SEQUENCES, [1, 1], k=0)
    gaps = [(scores.logp[row, : len(ids) - 1] - logps(model, ids)).abs().max() for row, ids in enumerate(SEQUENCES)]
    return max(gaps).item()


def load(runner, weights):
    for name, weight in weights:
        runner.model.load_weights([(name, weight.data)])


def has_kernels(model):
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    found = [method.moe_kernel is not None for method in methods if hasattr(method, "moe_kernel")]
    assert found
    return all(found)


def main(folder):
    tokenizer = save_model(folder, tied=False, experts=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    with extra_llm_options(**OPTIONS):
        generation = VLLMGeneration(
            model, Accelerator(cpu=True), tokenizer, mode="colocate", max_model_length=LONGEST, max_completion_length=16
        )
    llm, runner, found = generation.llm, model_runner_of(generation.llm), {}
    found["from the checkpoint"] = gap(llm, model)

    perturb(model)
    initialize_layerwise_reload(runner.model)
    load(runner, model.named_parameters())
    finalize_layerwise_reload(runner.model, runner.model_config)
    forget_prefixes(llm)
    found["vLLM's own reload"] = gap(llm, model)

    install_sync(generation)
    found["syncs"] = []
    for _ in range(4):
        perturb(model)
        generation.sync_weights()
        found["syncs"].append(gap(llm, model))

    name = "model.layers.0.self_attn.o_proj.weight"
    perturb(model, only=name)
    with reloaded(runner):
        load(runner, [(name, dict(model.named_parameters())[name])])
    forget_prefixes(llm)
    found["no new experts"] = gap(llm, model)

    try:
        with reloaded(runner):
            runner.model.load_weights([("model.norm.weight", torch.ones(3))])
    except AssertionError as error:
        found["failed"] = str(error)
    found["kernels after a failed load"] = has_kernels(runner.model)
    generation.sync_weights()
    found["after a failed load"] = gap(llm, model)

    really, reload_module.on_cpu = reload_module.on_cpu, lambda: False
    begin_reload(runner.model)
    found["kernels kept on a GPU"] = has_kernels(runner.model)
    end_reload(runner.model, runner.model_config)
    reload_module.on_cpu = really

    other = LLM(
        model=folder, max_model_len=LONGEST, weight_transfer_config=WeightTransferConfig(backend=BACKEND), **OPTIONS
    )
    sender = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0, timeout_seconds=200.0), client=LocalClient(other), source=ModuleSource(model)
    )
    found["before gloo"] = gap(other, model)
    found["gloo"] = []
    for _ in range(2):
        perturb(model)
        sender.send_weights()
        found["gloo"].append(gap(other, model))
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
