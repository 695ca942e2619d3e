"""Samplers for these tests: TRL's own `VLLMGeneration`, colocated, on the CPU.

Several engines can live in one process, but one that is collected takes the process groups of all with it: they stay
until the end.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm"):
    from trustrl.engines.vllm.options import set_cpu_environment

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    set_cpu_environment()


@pytest.fixture(scope="session")
def samplers(tmp_path_factory):
    """`samplers(tied=..., dtype=...)` gives a `VLLMGeneration`: trainer's model in float32 beside its sampler."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from trl.generation.vllm_generation import VLLMGeneration

    from support.rendezvous import free_port
    from support.tiny_models import LONGEST, save_model
    from trustrl.engines.vllm import cpu_options, extra_llm_options

    os.environ.setdefault("MASTER_PORT", str(free_port()))
    accelerator = Accelerator(cpu=True)
    built = {}

    def sampler(*, tied, dtype="float32"):
        if (tied, dtype) not in built:
            path = tmp_path_factory.mktemp("model")
            tokenizer = save_model(path, tied=tied)
            with extra_llm_options(max_logprobs=64, **cpu_options(dtype=dtype, kv_cache_memory_bytes=1 << 26)):
                built[tied, dtype] = VLLMGeneration(
                    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
                    accelerator,
                    tokenizer,
                    mode="colocate",
                    max_model_length=LONGEST,
                    max_completion_length=16,
                )
        generation = built[tied, dtype]
        vars(generation).pop("sync_weights", None)  # as TRL made it
        return generation

    return sampler


@pytest.fixture(params=[pytest.param(True, id="tied"), pytest.param(False, id="untied")])
def tied(request):
    return request.param
