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
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from support.rendezvous import free_port
from support.tiny_models import LONGEST, logps, perturb, save_model, some_sequences
from trustrl.engines.vllm import (
    cpu_options,
    extra_llm_options,
    install_sync,
    routed_experts,
    score,
    weight_reload as reload_module,
)  # fmt: skip
from trustrl.engines.vllm.clients import LocalClient
from trustrl.engines.vllm.decode_record import REQUEST, install
from trustrl.engines.vllm.gloo_transfer import BACKEND, GlooTrainerInitInfo
from trustrl.engines.vllm.weight_reload import begin_reload, end_reload, forget_prefixes, model_runner_of, reloaded
from trustrl.errors import EngineError

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


@torch.no_grad()
def routing(llm, model):
    """Compares vLLM's routed experts with the trainer's: several completions of a prompt, cached prefixes, both ends.

    Returns the share of tokens whose experts agree in both layers, over two calls with the same prompts.
    """
    asked = SamplingParams(
        max_tokens=9, ignore_eos=True, logprobs=2, n=3, seed=5, detokenize=False, extra_args={REQUEST: True}
    )
    same = []
    for _ in range(2):  # the second reads the prefix cache
        for answer in llm.generate([{"prompt_token_ids": ids} for ids in some_sequences(12, 30, 140)], asked):
            prompt = list(answer.prompt_token_ids)
            for one in answer.outputs:
                out = model(input_ids=torch.tensor([prompt + list(one.token_ids)]), output_router_logits=True)
                own = torch.stack([x.topk(2, -1).indices for x in out.router_logits], 1)[len(prompt) - 1 : -1]
                theirs = torch.from_numpy(one.logprobs.experts).long().view(own.shape)
                assert len(theirs) == len(one.token_ids)
                same += (own.sort(-1).values == theirs.sort(-1).values).flatten(1).all(-1).tolist()
    return {"tokens": len(same), "same": sum(same) / len(same)}


def refused_routing(llm):
    """What vLLM's own setting and a second connector say on a CPU."""
    said = []
    try:
        LLM(model=llm.model_config.model, max_model_len=LONGEST, **OPTIONS, **{routed_experts.OPTION: True})
    except ValueError as error:
        said.append(str(error))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before, scheduler.aux_output_connector = scheduler.aux_output_connector, object()
    try:
        routed_experts.fill_on_cpu(llm)
    except EngineError as error:
        said.append(str(error))
    scheduler.aux_output_connector = before
    return said


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

    install()
    routed_experts.record_routing(llm)
    found["routing"] = routing(llm, model)
    perturb(model)
    generation.sync_weights()
    found["routing after a sync"] = routing(llm, model)
    found["refused routing"] = refused_routing(llm)

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
