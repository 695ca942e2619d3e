"""verl's SGLang server with μ's top-K and kept ids in its answers. `rollout.name` stays "sglang".

verl builds SGLang's request itself, and keeps one log-prob per token of the answer, which is not μ if sampling is
truncated. Both happen around one call of `self.tokenizer_manager.generate_request`, so this server wraps that call.
Requests whose `extra_args` ask for a record carry it in `TokenOutput.extra_fields`. Other requests are not changed.

verl logs an error of one request and trains on the others, or asks for others without end. So a request that cannot be
recorded is answered as verl answers it, with the reason, which the next training step raises.

Seam: `SGLangHttpServer.launch_server`, `.generate(prompt_ids, sampling_params, request_id, ...)` and
      `.tokenizer_manager`. Imports SGLang.
"""

import inspect
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace
from typing import Any

import ray
from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.sglang_rollout import async_sglang_server  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.sglang_rollout.async_sglang_server import (  # pyright: ignore[reportMissingImports]
    SGLangHttpServer,
    SGLangReplica,
)

from trustrl.engines.common import seam
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.common.sampler_contract import Wanted, wanted_in
from trustrl.engines.common.sampler_fields import UNRECORDED
from trustrl.engines.sglang.sampler_adapter import SGLangAdapter
from trustrl.errors import EngineError

seam.require_parameters(
    SGLangHttpServer, "generate", ("self", "prompt_ids", "sampling_params", "request_id"), more=True
)
if not is_dataclass(ServerArgs):
    # verl 0.9.1 reads the names of SGLang's arguments with `dataclasses.fields`, once. Since 0.5.21 they are in no
    # dataclass, and releases with one cannot return the log-probs of kept ids.
    names = [SimpleNamespace(name=name) for name in inspect.signature(ServerArgs).parameters]
    async_sglang_server.dataclasses = SimpleNamespace(fields=lambda _: names)


@dataclass(slots=True)
class Recorded:
    """A request that is running, and its record once SGLang has answered."""

    wanted: Wanted
    record: SampledRecord | None = None
    reason: str | None = None
    """The reason why there is no record."""


# A context variable, because verl runs its requests as tasks of one thread, and SGLang's HTTP routes run others.
_CURRENT: ContextVar[Recorded | None] = ContextVar("recorded", default=None)


class RecordingServer(SGLangHttpServer):
    """verl's server, which returns the sampler's top-K and kept ids with the tokens if a request asks for them."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Starts verl's server, and wraps the call through which its requests go."""
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:  # the only node that answers requests
            manager = self.tokenizer_manager
            # verl aborts all requests before it sends weights, and then flushes the cache.
            adapter = SGLangAdapter.of(manager.server_args, manager.model_config.vocab_size, pause="abort")
            manager.generate_request = recording(manager.generate_request, adapter)

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **more: Any) -> Any:
        """Runs verl's own method, and adds the record to its answer."""
        parameters = dict(sampling_params)
        wanted, others = wanted_in(parameters.pop("extra_args", None))
        if others:
            parameters["extra_args"] = others  # not trustrl's: SGLang raises, as it does without this server
        if not any(wanted):
            return await super().generate(prompt_ids, parameters, request_id, **more)
        current = Recorded(wanted)
        token = _CURRENT.set(current)
        try:
            output = await super().generate(prompt_ids, {**parameters, "logprobs": True}, request_id, **more)
        finally:
            _CURRENT.reset(token)
        if current.reason is not None:
            output.extra_fields[UNRECORDED] = current.reason
        elif current.record is not None and output.token_ids:  # an aborted request may have none
            output.log_probs = current.record.logp.tolist()
            output.extra_fields.update(current.record.extra_fields())
        return output


def recording(generate: Any, adapter: SGLangAdapter) -> Any:
    """Returns SGLang's `generate_request`, which records the request of the running task."""

    async def recorded(request: Any, *args: Any, **more: Any) -> AsyncIterator[Any]:
        current = _CURRENT.get()
        if current is not None:
            current.reason = adapter.refusal(current.wanted, request.sampling_params)
        if current is not None and current.reason is None:
            request.sampling_params, fields = adapter.request(current.wanted, request.sampling_params)
            for name, value in fields.items():
                setattr(request, name, value)
        async for output in generate(request, *args, **more):
            # Before the output leaves: verl takes the first one and never asks for the end.
            if current is not None and current.reason is None:
                try:
                    current.record = adapter.record(output, current.wanted)
                except EngineError as error:
                    current.reason = str(error)
            yield output

    return recorded


class RecordingReplica(SGLangReplica):
    """verl's replica, with `RecordingServer` as its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RecordingServer)
