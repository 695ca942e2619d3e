"""A real SGLang on the CPU: one engine for a test process, because it starts slowly."""

import asyncio

import sglang
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)

CPU = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True, "max_total_tokens": 8192, "max_running_requests": 16, "skip_server_warmup": True,
    "log_level": "error", "mem_fraction_static": 0.9,
}  # fmt: skip
"""Arguments with which SGLang runs a small model on a CPU. Its memory estimate counts other programs, hence 0.9."""


class Sampler:
    """An engine, with calls that take the names of `GenerateReqInput`: `Engine.generate` lacks the newest."""

    def __init__(self, path, **options):
        self.engine = sglang.Engine(model_path=str(path), weight_version="0", **CPU | options)
        self.manager = self.engine.tokenizer_manager

    def run(self, call):
        return self.engine.loop.run_until_complete(asyncio.wait_for(call, 300))

    async def answer(self, prompt_ids, sampling_params, fields=None, **more):
        """The last of a request's outputs: a completion, or a list of them for n > 1."""
        request = GenerateReqInput(
            input_ids=list(prompt_ids), sampling_params=dict(sampling_params), **(fields or {}), **more
        )
        outputs = [output async for output in self.manager.generate_request(request, None)]
        return outputs[-1]

    def answers(self, prompts, sampling_params, fields=None):
        """One answer per prompt, asked together."""

        async def together():
            return await asyncio.gather(*(self.answer(prompt, sampling_params, fields) for prompt in prompts))

        return self.run(together())

    async def updated(self, path, version, *, mode):
        """Loads other weights between a pause of this mode and the continuation."""
        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))
        request = UpdateWeightFromDiskReqInput(
            model_path=str(path), weight_version=version, flush_cache=mode != "in_place", abort_all_requests=False
        )
        done, message, *_ = await self.manager.update_weights_from_disk(request, None)
        assert done, message
        await self.manager.continue_generation(ContinueGenerationReqInput())

    def close(self):
        self.engine.shutdown()
