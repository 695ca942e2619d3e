"""Compares arrays with vLLM's flat lists through `AsyncLLM`, whose engine is another process.

Nothing here installs the recorder: vLLM loads it as a plugin.
"""

import asyncio
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ["OMP_NUM_THREADS"] = "1"

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from trustrl.engines.vllm.decode_record import REQUEST

LENGTH = 24


async def main(path):
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            path, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 26, max_model_len=256,
            max_logprobs=-1, logprobs_mode="processed_logprobs", seed=0, skip_tokenizer_init=True,
        )
    )  # fmt: skip
    compared, kinds, count = 0, {}, 0

    async def one(i, k, *, delta=False, **more):
        nonlocal count
        count += 1
        kind = RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE
        parameters = SamplingParams(
            max_tokens=LENGTH, ignore_eos=True, logprobs=k, seed=i, detokenize=False, output_kind=kind, **more
        )
        prompt = {"prompt_token_ids": [5 + i, 6, 7, 8]}
        return [o.outputs[0] async for o in engine.generate(prompt, parameters, request_id=str(count))]

    for k in (0, 3, 20, 256):
        rows = range(6)
        flat = await asyncio.gather(*(one(i, k, flat_logprobs=True) for i in rows))
        marked = {"extra_args": {REQUEST: True}}
        complete = await asyncio.gather(*(one(i, k, **marked) for i in rows))
        deltas = await asyncio.gather(*(one(i, k, delta=True, **marked) for i in rows))
        for theirs, ours, pieces in zip(flat, complete, deltas, strict=True):
            ids, logp = ours[-1].logprobs.table()
            assert ids.shape == (LENGTH, 1 + k)
            assert theirs[-1].logprobs.token_ids == ids.ravel().tolist()
            assert theirs[-1].logprobs.logprobs == logp.ravel().tolist()
            tables = [piece.logprobs.table() for piece in pieces]
            assert [x for t, _ in tables for x in t.ravel().tolist()] == ids.ravel().tolist()
            assert [x for _, t in tables for x in t.ravel().tolist()] == logp.ravel().tolist()
            kinds |= {"complete": type(ours[-1].logprobs).__name__, "delta": type(pieces[0].logprobs).__name__}
            compared += 2
    (unmarked,) = (await one(0, 3))[-1:]
    kinds["unmarked"] = type(unmarked.logprobs).__name__
    import multiprocessing

    (child,) = multiprocessing.active_children()
    engine_process = child.pid
    engine.shutdown()
    print(
        json.dumps(
            {"compared": compared, "kinds": kinds, "engine_process": engine_process, "this_process": os.getpid()}
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
