"""Runs in vLLM's environment, without Ray: what the vLLM server answers, before and after new weights, as JSON."""

import asyncio
import json
import sys

from safetensors.torch import load_file

from trustrl.errors import ConfigError
from trustrl_verl_cpu.sampler_server import Limits, buckets
from trustrl_verl_cpu.vllm_server import VLLMServer


def plain(fields):
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in fields.items()}


async def main(job):
    server = VLLMServer(job["model"], Limits(160, 8, 168), batch_size=64, options={"seed": 1, "load_format": "dummy"})
    await server.start()
    sizes, answer = [], server._answers
    server._answers = lambda requests: sizes.append(len(requests)) or answer(requests)
    found = []
    for step, weights in enumerate(job["weights"]):
        await server.begin_weights()
        for piece in buckets(load_file(weights).items(), limit=20_000):
            await server.load_weights(piece)
        await server.end_weights(step)
        answers = await asyncio.gather(
            *(server.generate(ids, dict(how), str(i)) for i, (ids, how) in enumerate(job["calls"]))
        )
        found.append([[a.token_ids, a.log_probs, plain(a.extra_fields)] for a in answers])
    try:
        await server.generate([1, 2, 3], {"max_tokens": 1, "prompt_logprobs": 501})  # one more than the vocabulary
        refused = None
    except ConfigError as error:
        refused = str(error)
    with open(job["out"], "w") as file:
        json.dump({"answers": found, "sizes": sizes, "refused": refused, "verl": "verl" in sys.modules}, file)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(main(json.load(file)))
