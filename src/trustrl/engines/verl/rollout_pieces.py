"""Records of every request behind a verl response: top-K, kept ids, and the version of the weights, per token.

A response may come from several requests: the turns of a tool loop, and the attempts of a rollout that a weight update
interrupted. All of them end in `LLMServerClient.generate`. While `collecting` is active, each call keeps its tokens
with the fields that the server returned. `place` then puts them at the positions that follow from the length of each
request's prompt, and compares the ids.

Cost per token: 8 K + 4 bytes from the server to the loop, 2 n or 4 n more for n ids that truncation kept, and no
further request. Versions and turns cost 12 bytes per request, whatever its length.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from verl.workers.rollout import base, replica
from verl.workers.rollout.llm_server import LLMServerClient

from trustrl.config.sampling_parameters import shaping, truncating
from trustrl.engines.common import seam
from trustrl.engines.common.kept_columns import KeptColumn, check_limit
from trustrl.engines.common.sampler_contract import Wanted, asking
from trustrl.engines.common.sampler_fields import KEPT_COUNTS, KEPT_IDS, REPLICA, TOPK_IDS, TOPK_LOGP, UNRECORDED
from trustrl.errors import EngineError, MissingDataError

NOT_SAMPLED = -1
"""The id and the version at positions that no request sampled: a tool's answer."""


class Piece(NamedTuple):
    """Tokens that one request sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    version: int | None
    replica: str | None
    topk: tuple[np.ndarray, np.ndarray] | None
    kept: KeptColumn | None


@dataclass(slots=True)
class Collection:
    """Pieces collected so far, and the records to ask for."""

    k: int
    max_kept: int = 0
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that verl gave the loop. The checks at start have seen them."""

    pieces: list[Piece] = field(default_factory=list)
    unrecorded: str | None = None
    """The reason why a server answered without what it was asked for."""

    unseen: dict[str, float | None] = field(default_factory=dict)
    """Parameters of the loop's own requests that change the distribution in a way that the trainer does not know."""

    def note(self, asked: Mapping[str, Any]) -> None:
        """Compares the parameters of one request with those that verl gave the loop."""
        compared = [shaping] if self.max_kept else [shaping, truncating]
        for parameters in compared:
            expected, now = parameters(self.sampling_params.get), parameters(asked.get)
            names = [name for name in {**expected, **now} if expected.get(name) != now.get(name)]
            self.unseen |= {name: asked.get(name) for name in names}


class Placed(NamedTuple):
    """Records of one response."""

    requests: np.ndarray
    """(n, 3) int32: for each request the first of its tokens in the response, the one after the last, and the trainer's
    step whose weights drew them, −1 if unknown. Other tokens were not sampled."""

    replica: str | None
    """The server that answered all of these requests; None if several did, or if it is unknown."""

    topk_ids: np.ndarray
    """(R, K) int32; −1 if not sampled."""

    topk_logp: np.ndarray
    """(R, K) float32; −inf if not sampled."""

    kept: list[Any]
    """The ids that truncation kept at each token; empty where it did not run."""


# Context variables, because verl runs many loops as tasks of one thread.
_CURRENT: ContextVar[Collection | None] = ContextVar("rollout_pieces", default=None)
_SERVER: ContextVar[str | None] = ContextVar("server", default=None)


@contextmanager
def collecting(k: int, max_kept: int = 0, sampling_params: Mapping[str, Any] | None = None) -> Iterator[Collection]:
    """Context manager that collects the pieces of all requests made inside, by this task and by tasks it starts.

    Args:
        k: The number of the sampler's most probable ids to ask for; 0 for none.
        max_kept: The largest number of ids that truncation may keep. Requests without truncation do not ask for them.
        sampling_params: The parameters that verl gave the loop.
    """
    collection = Collection(k, max_kept, sampling_params or {})
    before = _CURRENT.set(collection)
    try:
        yield collection
    finally:
        _CURRENT.reset(before)


def install() -> None:
    """Makes verl's client keep pieces while `collecting` is active. Later calls have no effect.

    Raises:
        EngineError: If verl's client has other parameters than this adapter supports.
    """
    original, acquire = LLMServerClient.generate, LLMServerClient._acquire_server
    if hasattr(original, "collects"):
        return
    seam.require_parameters(
        LLMServerClient, "generate", ("self", "request_id", "prompt_ids", "sampling_params"), more=True
    )
    seam.require_parameters(LLMServerClient, "_acquire_server", ("self", "request_id"), more=True)

    @functools.wraps(acquire)
    async def noting_the_server(self: Any, request_id: Any, **more: Any) -> Any:
        server_id, server = await acquire(self, request_id, **more)
        _SERVER.set(server_id)  # `generate` awaits this in the same task
        return server_id, server

    @functools.wraps(original)
    async def generate(self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **more: Any) -> Any:
        collection = _CURRENT.get()
        _SERVER.set(None)
        if collection is None:
            output = await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more)
            output.extra_fields[REPLICA] = _SERVER.get()  # verl's own loops carry it with the sequence
            return output
        collection.note(sampling_params)
        sampling_params = asking(Wanted(collection.k, collection.max_kept), sampling_params)
        output = await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more)
        collection.unrecorded = output.extra_fields.pop(UNRECORDED, None) or collection.unrecorded
        # Removed here: verl would carry the first request's arrays with the sequence.
        fields = [output.extra_fields.pop(name, None) for name in (TOPK_IDS, TOPK_LOGP, KEPT_IDS, KEPT_COUNTS)]
        if output.token_ids:
            topk = None if fields[0] is None else (fields[0], fields[1])
            kept = None if fields[2] is None else KeptColumn(fields[2], fields[3])
            version = output.extra_fields.get("global_steps")
            ids = list(prompt_ids), list(output.token_ids)
            collection.pieces.append(Piece(*ids, version, _SERVER.get(), topk, kept))
        return output

    generate.collects = True  # pyright: ignore[reportAttributeAccessIssue]
    LLMServerClient.generate, LLMServerClient._acquire_server = generate, noting_the_server


def place(collection: Collection, prompt_ids: list[int], response_ids: list[int], response_mask: list[int]) -> Placed:
    """Returns the records of one response.

    Args:
        collection: All pieces of the loop that made the response. Those of other responses are left out.
        prompt_ids: The ids of the response's prompt.
        response_ids: The ids of the response, perhaps cut at the end.
        response_mask: 1 on the tokens in the loss.

    Raises:
        EngineError: If a token in the loss is in no piece, if truncation kept more ids than are recorded, if the
            loop's requests change the distribution in a way that the trainer does not know, or if a server could not
            record one.
        MissingDataError: If a server returned no top-K.
    """
    _refuse_unseen(collection.unseen)
    if collection.unrecorded is not None:
        raise EngineError(collection.unrecorded)
    k, length, sequence = collection.k, len(response_ids), [*prompt_ids, *response_ids]
    ids, logp = np.full((length, k), NOT_SAMPLED, np.int32), np.full((length, k), -np.inf, np.float32)
    kept: list[Any] = [()] * length
    sampled = np.zeros(length, bool)
    spans: list[tuple[int, int, int]] = []
    replicas: set[str | None] = set()
    for piece in collection.pieces:
        start = len(piece.prompt_ids) - len(prompt_ids)
        rows = min(len(piece.token_ids), length - start)
        # A request of another response that the same loop made.
        if start < 0 or rows <= 0 or sequence[: len(piece.prompt_ids)] != piece.prompt_ids:
            continue
        if response_ids[start : start + rows] != piece.token_ids[:rows]:
            continue
        span = slice(start, start + rows)
        sampled[span] = True
        spans.append((start, start + rows, NOT_SAMPLED if piece.version is None else piece.version))
        replicas.add(piece.replica)
        if k:
            ids[span], logp[span] = _topk_of(piece, rows, k)
        if piece.kept is not None:
            check_limit(piece.kept, collection.max_kept)
            kept[span] = piece.kept.rows()[:rows]
    lost = int(np.sum(~sampled & (np.asarray(response_mask) != 0)))
    if lost:
        raise EngineError(
            f"Every token in the loss must be one that the sampler drew, got {lost} of {length} that are in no "
            "request's answer. The agent loop must keep the sampled ids and must not tokenize the text again."
        )
    requests = np.array(spans, np.int32).reshape(-1, 3)
    return Placed(requests, replicas.pop() if len(replicas) == 1 else None, ids, logp, kept)


def _refuse_unseen(unseen: Mapping[str, float | None]) -> None:
    """Raises if requests of an agent loop change the distribution in a way that the trainer does not know."""
    if not unseen:
        return
    got = " and ".join(f"{name}={value}" for name, value in unseen.items())
    if truncating(unseen.get) == unseen:
        raise EngineError(
            f"policy_loss.max_kept must be set if an agent loop truncates its own requests, got null with {got}. μ is "
            "renormalized over the kept ids, so they must be recorded. Set max_kept to the largest number of ids that "
            "a token may keep, or leave the parameter out of the requests."
        )
    raise EngineError(
        f"An agent loop must request tokens with the sampling parameters that verl passes to `run`, got {got}. π does "
        "not include the change. Set temperature and penalties in actor_rollout_ref.rollout, or leave them out."
    )


def _topk_of(piece: Piece, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first K of the server's ids and log-probs at the first tokens of a piece."""
    if piece.topk is None or piece.topk[0].shape[-1] < k or len(piece.topk[0]) != len(piece.token_ids):
        shape = None if piece.topk is None else piece.topk[0].shape
        raise MissingDataError(
            f"The sampler must return its {k} most probable ids at each of {len(piece.token_ids)} tokens, got {shape}. "
            "Start the run with `python -m trustrl.engines.verl`, which installs a server that does."
        )
    return piece.topk[0][:rows, :k], piece.topk[1][:rows, :k]


THEIR_SENDER = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"


def register_servers() -> None:
    """Registers the recording replicas, and the sender of SGLang's weights, under verl's own names.

    Calling it again has no effect.

    A replica that another plugin registered under such a name stays. Regions on the sampled token work with it, and
    Top-K regions on the sampler raise if its answers lack the top-K.
    """
    registry = replica.RolloutReplicaRegistry
    for name, theirs, ours in (("vllm", replica._load_vllm, load_vllm), ("sglang", replica._load_sglang, load_sglang)):
        if registry._registry.get(name) is theirs:
            registry.register(name, ours)
    if base._ROLLOUT_REGISTRY["sglang", "async"] == THEIR_SENDER:
        base._ROLLOUT_REGISTRY["sglang", "async"] = "trustrl.engines.verl.sglang_weights.WeightSender"


def load_vllm() -> Any:
    """Returns the class of vLLM's replica. Imports vLLM."""
    from trustrl.engines.verl.vllm_server import RecordingReplica

    return RecordingReplica


def load_sglang() -> Any:
    """Returns the class of SGLang's replica. Imports SGLang."""
    replica._load_sglang()  # stands in for the names of vLLM that verl's module imports
    from trustrl.engines.verl.sglang_server import RecordingReplica

    return RecordingReplica
