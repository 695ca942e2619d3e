"""What both samplers share: requests that come one by one are answered in batches, and weights change in between."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trustrl.engines.verl_cpu.contract import Answer, Limits, Request, request_of
from trustrl.engines.verl_cpu.weights import Bucket
from trustrl.errors import ConfigError

QUIET_SECONDS = 0.01
"""A batch is closed when nothing has come for so long: verl sends a batch's prompts one after the other."""

T = TypeVar("T")


class NothingToFree:
    """verl frees a GPU's memory between rollouts, and stops requests; on a CPU there is nothing to do."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing: it never sleeps."""

    async def sleep(self) -> None:
        """Nothing."""

    async def clear_kv_cache(self) -> None:
        """Nothing: no cache outlives new weights."""

    async def release_kv_cache(self) -> None:
        """Nothing."""

    async def resume_kv_cache(self) -> None:
        """Nothing."""

    async def resume_generation(self) -> None:
        """Nothing: generation is never interrupted."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Nothing: requests are short and run to their end."""
        return {}

    async def start_profile(self, **_: Any) -> None:
        """Nothing."""

    async def stop_profile(self) -> None:
        """Nothing."""


class BatchingServer(NothingToFree, ABC):
    """A Ray actor as verl's agent loops and trainer call it.

    The model belongs to one thread. Requests and weights queue up for it, so a batch is never answered by two policies,
    and the event loop stays free to take requests.
    """

    def __init__(self, limits: Limits, batch_size: int) -> None:
        self._limits, self._batch_size = limits, batch_size
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._arrived = asyncio.Event()
        self._answering: asyncio.Task[None] | None = None
        self._model_thread = ThreadPoolExecutor(max_workers=1)
        self._global_steps: int | None = None

    @abstractmethod
    def _start(self) -> None:
        """Loads the model."""

    @abstractmethod
    def _answers(self, requests: list[Request]) -> list[Answer]:
        """One answer a request, in order."""

    @abstractmethod
    def _begin_weights(self) -> None:
        """Before the first bucket."""

    @abstractmethod
    def _load_weights(self, bucket: Bucket) -> None:
        """Takes some weights over."""

    @abstractmethod
    def _end_weights(self) -> None:
        """After the last bucket; raises when something is missing."""

    async def start(self) -> None:
        """Ready when it returns."""
        await self._on_model_thread(self._start)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str = "", **more: Any
    ) -> Answer:
        """One completion, or, with `prompt_logprobs`, the scores of a finished sequence.

        Raises:
            ConfigError: the request does not fit this sampler.
        """
        given = [name for name, value in more.items() if value is not None and name.endswith("_data")]
        if given:
            raise ConfigError(f"A prompt must be text with this sampler, got {', '.join(given)} too.")
        request = request_of(prompt_ids, sampling_params, self._limits)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._arrived.set()
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while self._waiting:
            await self._until_quiet()
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            try:
                found = await self._on_model_thread(self._stamped_answers, [request for request, _ in batch])
            except Exception as error:  # whoever asked must hear of it; the server goes on
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), one in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(one)

    async def _until_quiet(self) -> None:
        while len(self._waiting) < self._batch_size:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), QUIET_SECONDS)
            except TimeoutError:
                return

    def _stamped_answers(self, requests: list[Request]) -> list[Answer]:
        answers = self._answers(requests)
        for answer in answers:
            answer.extra_fields["global_steps"] = self._global_steps
        return answers

    async def begin_weights(self) -> None:
        """Weights are coming."""
        await self._on_model_thread(self._begin_weights)

    async def load_weights(self, bucket: Bucket) -> None:
        """Some of them."""
        await self._on_model_thread(self._load_weights, bucket)

    async def end_weights(self, global_steps: int | None) -> None:
        """That was all; answers from now on carry this step."""
        await self._on_model_thread(self._end_weights)
        self._global_steps = global_steps

    async def _on_model_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, call, *args)
