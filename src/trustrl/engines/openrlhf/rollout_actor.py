"""OpenRLHF's Ray actor around vLLM, which records what a region reads of the sampler besides log μ.

Seam:     `RolloutRayActor.generate` and its `executor`, around which this actor puts its own; `update_weight` and
          `update_weight_cuda_ipc`, after the last of which it names the weights to vLLM by their number
Added:    `SampledRow` in a response's `mm_train_inputs`, which OpenRLHF carries to the update
Switch:   the region of the variable TRUSTRL_REGION, and requests that truncate

Importing this module replaces the actor in `openrlhf.trainer.ray.vllm_engine`. Imports vLLM.
"""

import os
from copy import copy
from typing import Any

import ray
from openrlhf.trainer.ray import vllm_engine

from trustrl.config.sampling_parameters import NEUTRAL, TRUNCATION
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.common.sampler_contract import Wanted, draws_from_a_part
from trustrl.engines.openrlhf.launcher import KEPT_VARIABLE, OPTION, VARIABLE, max_kept_given
from trustrl.engines.openrlhf.sampled_rows import SAMPLED, is_recorded, row_of, topk_of_sampler
from trustrl.engines.vllm.sampler_adapter import VLLMAdapter
from trustrl.errors import ConfigError

Stock: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__
"""OpenRLHF's class, which Ray's decorator hides."""

GENERATES_WITH = ("self", "prompt_token_ids", "sampling_params", "multi_modal_data")
UPDATES_WITH = ("self", "name", "dtype", "shape", "empty_cache")
UPDATES_BY_IPC_WITH = ("self", "name", "dtype", "shape", "ipc_handles", "empty_cache")

# Ray may have added a parameter for its traces.
seam.require_parameters(Stock, "generate", GENERATES_WITH, more=True)
seam.require_parameters(Stock, "update_weight", UPDATES_WITH, more=True)
seam.require_parameters(Stock, "update_weight_cuda_ipc", UPDATES_BY_IPC_WITH, more=True)


class RecordingRolloutActor(Stock):
    """`RolloutRayActor` that records its requests."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportGeneralTypeIssues]: Ray's
        region = region_given(os.environ.get(VARIABLE), OPTION)
        if kwargs.get("max_logprobs") is not None:
            kwargs["max_logprobs"] = -1  # OpenRLHF's is 1, and a request without more log-probs costs the same
        await super().__init__(*args, **kwargs)
        self._updates = 0
        self.executor = RecordingExecutor(
            self.executor, topk_of_sampler(region), max_kept_given(os.environ.get(KEPT_VARIABLE)),
            always=is_recorded(region, truncated=False),
        )  # fmt: skip
        await self._name_weights()

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        """Runs OpenRLHF's method. `empty_cache` marks the last weight of an update."""
        result = await super().update_weight(name, dtype, shape, empty_cache)
        await self._count(empty_cache)
        return result

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> Any:
        """Runs OpenRLHF's method, as `update_weight` does."""
        result = await super().update_weight_cuda_ipc(name, dtype, shape, ipc_handles, empty_cache)
        await self._count(empty_cache)
        return result

    async def _count(self, is_last: bool) -> None:
        if is_last:
            self._updates += 1
            await self._name_weights()

    async def _name_weights(self) -> None:
        name_weights = getattr(self.llm, "update_weight_version", None)  # vLLM 0.32 has it
        if name_weights is not None:
            await name_weights(str(self._updates))


class RecordingExecutor:
    """An agent executor whose responses carry the records of its requests.

    Args:
        executor: OpenRLHF's, or the user's.
        top_k: The number of most probable ids to record.
        max_kept: The largest number of ids that truncation may keep.
        always: Whether requests that do not truncate are recorded too.
    """

    def __init__(self, executor: Any, top_k: int, max_kept: int, *, always: bool) -> None:
        self._executor = executor
        self._top_k, self._max_kept, self._always = top_k, max_kept, always
        self._adapter: VLLMAdapter | None = None

    async def execute(self, *, llm_engine: Any, **arguments: Any) -> dict[str, Any]:
        """Runs the agent once, as `AgentExecutorBase.execute` does.

        Raises:
            ConfigError: If the response has images.
            EngineError: If a request cannot be recorded, or the response does not have the sampled tokens.
        """
        engine = RecordingEngine(llm_engine, self)
        response = await self._executor.execute(llm_engine=engine, **arguments)
        if not engine.records:
            return response
        if response.get("mm_train_inputs") is not None:
            raise ConfigError(
                "Prompts must have no images if requests are recorded, got some. Choose a region on the sampled token "
                "without max_staleness, and sample without top_p, top_k and min_p."
            )
        row = row_of(engine.records, response, top_k=self._top_k, max_kept=self._max_kept)
        return {**response, "mm_train_inputs": {SAMPLED: row}}

    def wanted(self, sampling_params: dict[str, Any]) -> Wanted | None:
        """Returns what to record of a request; None if the region reads no more of it than log μ."""
        truncated = draws_from_a_part(sampling_params)
        return Wanted(self._top_k, self._max_kept if truncated else 0) if self._always or truncated else None

    def adapter(self, llm_engine: Any) -> VLLMAdapter:
        """Returns the adapter of an actor's vLLM. It is made for the first recorded request: it changes vLLM."""
        self._adapter = self._adapter or VLLMAdapter.of(llm_engine.llm.vllm_config)
        return self._adapter


class RecordingEngine:
    """OpenRLHF's actor as one agent's `llm_engine`, which keeps the records of its requests in order."""

    def __init__(self, engine: Any, executor: RecordingExecutor) -> None:
        self._engine, self._executor = engine, executor
        self.records: list[SampledRecord] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Runs one request, and records it if the region reads it or if it truncates."""
        own = {name: getattr(sampling_params, name) for name in (*TRUNCATION, *NEUTRAL)}
        wanted = self._executor.wanted(own)
        if wanted is None:
            return await self._engine.generate(prompt_token_ids, sampling_params, multi_modal_data)
        adapter, recorded = self._executor.adapter(self._engine), copy(sampling_params)
        request = adapter.request(wanted, {**own, "extra_args": sampling_params.extra_args})
        for name, value in request.sampling_params.items():
            setattr(recorded, name, value)
        output = await self._engine.generate(prompt_token_ids, recorded, multi_modal_data)
        self.records.append(adapter.record(output.outputs[0], wanted))
        return output


vllm_engine.RolloutRayActor = ray.remote(RecordingRolloutActor)
