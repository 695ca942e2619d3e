"""verl's vLLM server with μ's top-K in its answers. `rollout.name` stays "vllm", so verl's checks of that name hold.

verl overwrites `logprobs` in each request, and keeps one number per token of the answer. Both happen around one call of
`self.engine.generate`, so this server wraps that call: requests with `extra_args={TOPK: K}` record K ids while vLLM
decodes, and the answer carries them in `TokenOutput.extra_fields`. Other requests are not changed.

Seam: `vLLMHttpServer.generate(prompt_ids, sampling_params, request_id, ...)` and `vLLMHttpServer.engine`. Imports vLLM.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import (  # pyright: ignore[reportMissingImports]
    vLLMHttpServer,
    vLLMReplica,
)

from trustrl.config.sampling_parameters import NEUTRAL, TRUNCATION
from trustrl.engines.common import seam
from trustrl.engines.common.sampler_contract import Wanted, wanted_in
from trustrl.engines.vllm.sampler_adapter import VLLMAdapter

seam.require_parameters(vLLMHttpServer, "generate", ("self", "prompt_ids", "sampling_params", "request_id"), more=True)


class RecordingServer(vLLMHttpServer):
    """verl's server, which returns the sampler's top-K with the tokens if a request asks for it."""

    _recorded: dict[str, dict[str, np.ndarray]] | None = None
    """The fields of running requests, by request id; None until the engine is wrapped."""

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **more: Any) -> Any:
        """Runs verl's own method, and adds the recorded fields to its answer.

        Raises:
            EngineError: If the installed vLLM cannot record.
        """
        if not any(wanted_in(sampling_params.get("extra_args"))[0]):
            return await super().generate(prompt_ids, sampling_params, request_id, **more)
        if self._recorded is None:
            self._recorded = {}
            adapter = VLLMAdapter.of(self.engine.vllm_config)
            self.engine.generate = self._recording(self.engine.generate, adapter, self._recorded)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **more)
        finally:
            fields = self._recorded.pop(request_id, {})
        if output.token_ids:  # an aborted request may have none
            output.extra_fields.update(fields)
        return output

    @staticmethod
    def _recording(generate: Any, adapter: VLLMAdapter, recorded: dict[str, dict[str, np.ndarray]]) -> Any:
        async def kept(stream: Any, request_id: str, wanted: Wanted) -> AsyncIterator[Any]:
            last = None
            async with aclosing(stream):
                async for output in stream:
                    last = output
                    yield output
            if last is not None and last.outputs:
                recorded[request_id] = adapter.record(last.outputs[0], wanted).extra_fields()

        # The same parameters as vLLM's: its HTTP routes call this engine too.
        def recording(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **more: Any) -> Any:
            wanted, others = wanted_in(getattr(sampling_params, "extra_args", None))
            if not any(wanted):
                return generate(prompt, sampling_params, request_id, *args, **more)
            # Here, because verl's method has just overwritten `logprobs`.
            own = {name: getattr(sampling_params, name) for name in (*TRUNCATION, *NEUTRAL)}
            for name, value in adapter.request(wanted, {**own, "extra_args": others}).sampling_params.items():
                setattr(sampling_params, name, value)
            return kept(generate(prompt, sampling_params, request_id, *args, **more), request_id, wanted)

        return recording


class RecordingReplica(vLLMReplica):
    """verl's replica, with `RecordingServer` as its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RecordingServer)
