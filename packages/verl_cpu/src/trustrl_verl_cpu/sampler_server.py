"""Server that both samplers share: its requests and answers, its weights, and the Ray actor that batches requests.

The vLLM server imports this module in an environment without verl. Weights travel through Ray's object store as a few
large byte arrays, which Ray passes without a copy.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trustrl.engines.common.sampler_contract import Wanted, wanted_in
from trustrl.errors import ConfigError, EngineError

BUCKET_BYTES = 32 << 20
"""Largest size of a bucket of weights, unless a single tensor is larger."""

QUIET_SECONDS = 0.01
"""A batch is closed if no request arrives for this long. verl sends the prompts of a batch one after the other."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, with the parameters of its continuation."""

    prompt_ids: list[int]

    max_tokens: int

    temperature: float = 1.0
    """0 chooses the most probable token."""

    prompt_logprobs: int | None = None
    """If given, the request scores the prompt: K most probable ids per position, or 0 for only the prompt's tokens."""

    wanted: Wanted = field(default_factory=Wanted)
    """The data to return at each sampled token."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The other entries of verl's `sampling_params`, for samplers that support more than temperature."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The lengths that the sampler was started with."""

    prompt: int
    response: int
    total: int


def request_of(prompt_ids: list[int], sampling_params: Mapping[str, Any], limits: Limits) -> Request:
    """Converts verl's call to a request.

    Raises:
        ConfigError: If the prompt is too long, or a scoring request asks for more than one token.
    """
    ids, options = list(prompt_ids), dict(sampling_params)
    options.pop("logprobs", None)  # every answer contains them
    wanted, extra = wanted_in(options.pop("extra_args", None))
    if extra:
        options["extra_args"] = extra
    temperature = options.pop("temperature", None)
    temperature = 1.0 if temperature is None else float(temperature)
    asked = options.pop("max_tokens", options.pop("max_new_tokens", None))
    scored = options.pop("prompt_logprobs", None)
    if scored is not None:
        if asked != 1:
            raise ConfigError(
                f"max_tokens must be 1 with prompt_logprobs, got {asked}. A request either scores a finished sequence "
                "or samples one."
            )
        if not 1 <= len(ids) <= limits.total:
            raise ConfigError(
                f"A sequence to score must have 1 to {limits.total} tokens, got {len(ids)}. Raise "
                "actor_rollout_ref.rollout.max_model_len."
            )
        return Request(ids, 1, temperature, int(scored), options=options)
    room = limits.total - len(ids)
    if room < 1:
        raise ConfigError(
            f"A prompt must have fewer than {limits.total} tokens, got {len(ids)}. Raise data.max_prompt_length or "
            "actor_rollout_ref.rollout.max_model_len."
        )
    if asked is None:
        asked = min(limits.response, limits.prompt + limits.response - len(ids))
    return Request(ids, max(1, min(int(asked), room)), temperature, wanted=wanted, options=options)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. It unpickles as verl's own `TokenOutput`, so a sampler can create it without verl."""

    token_ids: list[int] = field(default_factory=list)

    log_probs: list[float] = field(default_factory=list)
    """Log-probs under the distribution that the tokens were drawn from."""

    extra_fields: dict[str, Any] = field(default_factory=dict)

    stop_reason: str = "completed"
    """"aborted" if a weight update interrupted the response: verl asks for the rest afterwards."""

    routed_experts: np.ndarray | None = None
    """(prompt + tokens − 1, layers, experts per token): the routers' choices, if verl replays them."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.token_ids, self.log_probs, self.extra_fields, self.stop_reason, self.routed_experts)
        return token_output, fields


def token_output(
    token_ids: list[int],
    log_probs: list[float],
    extra_fields: dict[str, Any],
    stop_reason: str = "completed",
    routed_experts: np.ndarray | None = None,
) -> Any:
    """Returns verl's `TokenOutput`."""
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(
        token_ids=token_ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields=dict(extra_fields),
        routed_experts=routed_experts,
    )  # fmt: skip


def scores(ids: list[list[int]], logps: list[list[float]], k: int) -> Answer:
    """Returns an answer with verl's `prompt_logprobs`: row j predicts token j+1, and the last row is 0.

    No token is sampled, so scoring does not advance the random stream of the next rollout.
    """
    width = max(k, 1)
    return Answer(extra_fields={"prompt_ids": [*ids, [0] * width], "prompt_logprobs": [*logps, [0.0] * width]})


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a checkpoint, concatenated as bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    data: np.ndarray

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns copies of the tensors, because Ray's memory is read-only and may be freed.

        Raises:
            EngineError: If the bucket has the wrong size.
        """
        data = torch.from_numpy(self.data.copy())
        types = [getattr(torch, name) for name in self.dtypes]
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in zip(types, self.shapes, strict=True)]
        if sum(sizes) != len(data):
            raise EngineError(f"A bucket of weights must hold {sum(sizes)} bytes, got {len(data)}.")
        starts = accumulate(sizes, initial=0)
        return [
            # A byte offset may be misaligned for floats; `clone` moves the piece to aligned memory.
            (name, data[start : start + size].clone().view(dtype).view(shape))
            for name, dtype, shape, start, size in zip(self.names, types, self.shapes, starts, sizes, strict=False)
        ]


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yields all of the weights in order, in buckets of at most `limit` bytes or one tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield _packed(held)
            held, size = [], 0
        # The trainer may change or free the tensor while the bucket fills.
        held.append((name, tensor.detach().to("cpu", copy=True)))
        size += tensor.nbytes
    if held:
        yield _packed(held)


def _packed(held: list[tuple[str, Tensor]]) -> Bucket:
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in held]
    return Bucket(
        names=[name for name, _ in held],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
        shapes=[tuple(tensor.shape) for _, tensor in held],
        data=torch.cat(pieces).numpy(),
    )


class NothingToFree:
    """Methods with which verl frees a GPU's memory between rollouts. On a CPU they do nothing."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Does nothing: the server never sleeps."""

    async def sleep(self) -> None:
        """Does nothing."""

    async def clear_kv_cache(self) -> None:
        """Does nothing: new weights already clear the caches."""

    async def release_kv_cache(self) -> None:
        """Does nothing."""

    async def resume_kv_cache(self) -> None:
        """Does nothing."""

    async def start_profile(self, **_: Any) -> None:
        """Does nothing."""

    async def stop_profile(self) -> None:
        """Does nothing."""


class BatchingServer(NothingToFree, ABC):
    """Ray actor with the methods that verl's agent loops and trainer call.

    One thread owns the model. Requests and weights queue for that thread, so one policy answers a whole batch, and the
    event loop stays free to accept requests.

    Args:
        limits: Lengths of prompts and responses.
        batch_size: The largest number of requests that are answered together.
    """

    def __init__(self, limits: Limits, batch_size: int) -> None:
        self._limits, self._batch_size = limits, batch_size
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        self._arrived = asyncio.Event()
        self._answering: asyncio.Task[None] | None = None
        self._model_thread = ThreadPoolExecutor(max_workers=1)
        self._global_steps: int | None = None
        self._open, self._rejects = asyncio.Event(), False
        self._open.set()
        self._interrupted = threading.Event()

    @abstractmethod
    def _start(self) -> None:
        """Loads the model."""

    @abstractmethod
    def _sampled(self, requests: list[Request]) -> Iterable[Answer]:
        """Returns the completion of each request."""

    @abstractmethod
    def _scored(self, requests: list[Request], k: int) -> Iterable[Answer]:
        """Returns the scores of each request's sequence: K most probable ids per position, or 0 for its own tokens."""

    def _answers(self, requests: list[Request]) -> list[Answer]:
        """Returns one answer per request, in order."""
        places_of: dict[int | None, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            places_of[request.prompt_logprobs].append(place)
        answers: dict[int, Answer] = {}
        for k, places in places_of.items():
            group = [requests[place] for place in places]
            replies = self._sampled(group) if k is None else self._scored(group, k)
            answers.update(zip(places, replies, strict=True))
        return [answers[place] for place in range(len(requests))]

    @abstractmethod
    def _begin_weights(self) -> None:
        """Prepares for new weights, before the first bucket."""

    @abstractmethod
    def _load_weights(self, bucket: Bucket) -> None:
        """Loads the weights of one bucket."""

    @abstractmethod
    def _end_weights(self) -> None:
        """Finishes the update, after the last bucket. Raises if weights are missing."""

    async def start(self) -> None:
        """Loads the model. The server is ready when this returns."""
        await self._on_model_thread(self._start)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str = "", **more: Any
    ) -> Answer:
        """Returns one completion or, with `prompt_logprobs`, the scores of a finished sequence.

        Raises:
            ConfigError: If this sampler does not support the request.
        """
        media = [name for name, value in more.items() if value is not None and name.endswith("_data")]
        if media:
            raise ConfigError(f"A prompt must be only text with this sampler, got {', '.join(media)} too.")
        request = request_of(prompt_ids, sampling_params, self._limits)
        if self._rejects:
            return self._nothing_yet()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._arrived.set()
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while self._waiting:
            await self._open.wait()
            await self._until_quiet()
            if not self._open.is_set():
                continue
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            try:
                replies = await self._on_model_thread(self._stamped_answers, [request for request, _ in batch])
            except Exception as error:  # the callers receive the error, and the server keeps running
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), reply in zip(batch, replies, strict=True):
                if not answer.done():
                    answer.set_result(reply)

    async def _until_quiet(self) -> None:
        while len(self._waiting) < self._batch_size:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), QUIET_SECONDS)
            except TimeoutError:
                return

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends the running batch early, which answers with the tokens it has, and holds later requests.

        Args:
            reject_request: True to answer requests with no tokens until `resume_generation`, instead of holding them.
        """
        self._open.clear()
        self._interrupted.set()
        self._rejects = reject_request
        if reject_request:
            held, self._waiting = self._waiting, []
            for _, answer in held:
                if not answer.done():
                    answer.set_result(self._nothing_yet())
        await self._on_model_thread(lambda: None)  # returns after the running batch
        return {}

    async def resume_generation(self) -> None:
        """Answers requests again, the held ones first."""
        self._rejects = False
        self._interrupted.clear()
        self._open.set()

    def _nothing_yet(self) -> Answer:
        return Answer(extra_fields={"global_steps": self._global_steps}, stop_reason="aborted")

    def _stamped_answers(self, requests: list[Request]) -> list[Answer]:
        answers = self._answers(requests)
        for answer in answers:
            answer.extra_fields["global_steps"] = self._global_steps
        return answers

    async def begin_weights(self) -> None:
        """Starts a weight update."""
        await self._on_model_thread(self._begin_weights)

    async def load_weights(self, bucket: Bucket) -> None:
        """Loads one bucket of weights."""
        await self._on_model_thread(self._load_weights, bucket)

    async def end_weights(self, global_steps: int | None) -> None:
        """Finishes a weight update. Later answers carry this step; None repeats the weights of the last one."""
        await self._on_model_thread(self._end_and_stamp, global_steps)

    def _end_and_stamp(self, global_steps: int | None) -> None:
        # On the model's thread, so that no batch runs between the new weights and their number.
        self._end_weights()
        if global_steps is not None:
            self._global_steps = global_steps

    async def _on_model_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, call, *args)
