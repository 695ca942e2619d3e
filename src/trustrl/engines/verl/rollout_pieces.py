"""Records of every request behind a verl response: top-K, kept ids, and the version of the weights, per token.

A response may come from several requests: the turns of a tool loop, and the attempts of a rollout that a weight update
interrupted. All of them end in `LLMServerClient.generate`. While `collecting` is active, each call keeps its tokens
with the fields that the server returned. `place` then puts them at the positions that follow from the length of each
request's prompt, and compares the ids.

Cost per token: 8 K + 4 bytes from the server to the loop, 4 (n + 1) more for n ids that truncation kept, and no further
request.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from verl.workers.rollout.llm_server import LLMServerClient

from trustrl.engines.common import seam
from trustrl.engines.common.kept_columns import KeptColumn, check_limit
from trustrl.engines.common.sampler_fields import KEPT, KEPT_COUNTS, KEPT_IDS, TOPK, TOPK_IDS, TOPK_LOGP
from trustrl.errors import EngineError, MissingDataError

NOT_SAMPLED = -1
"""The id and the version at positions that no request sampled: a tool's answer."""


class Piece(NamedTuple):
    """Tokens that one request sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    version: int | None
    topk: tuple[np.ndarray, np.ndarray] | None
    kept: KeptColumn | None


@dataclass(slots=True)
class Collection:
    """Pieces collected so far, and the records to ask for."""

    k: int
    max_kept: int = 0
    pieces: list[Piece] = field(default_factory=list)


class Placed(NamedTuple):
    """Records at each response token."""

    version: np.ndarray
    """(R,) int32: the trainer's step whose weights drew the token; −1 if unknown or not sampled."""

    turn: np.ndarray
    """(R,) int32: the number of the request that drew the token, from 0; −1 if not sampled."""

    topk_ids: np.ndarray
    """(R, K) int32; −1 if not sampled."""

    topk_logp: np.ndarray
    """(R, K) float32; −inf if not sampled."""

    kept: list[Any]
    """The ids that truncation kept at each token; empty where it did not run."""


_CURRENT: ContextVar[Collection | None] = ContextVar("rollout_pieces", default=None)


@contextmanager
def collecting(k: int, max_kept: int = 0) -> Iterator[Collection]:
    """Context manager that collects the pieces of all requests made inside, by this task and by tasks it starts.

    Args:
        k: The number of the sampler's most probable ids to ask for; 0 for none.
        max_kept: The largest number of ids that truncation may keep. Requests without truncation do not ask for them.
    """
    collection = Collection(k, max_kept)
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
    original = LLMServerClient.generate
    if hasattr(original, "collects"):
        return
    seam.require_parameters(
        LLMServerClient, "generate", ("self", "request_id", "prompt_ids", "sampling_params"), more=True
    )

    @functools.wraps(original)
    async def generate(self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **more: Any) -> Any:
        collection = _CURRENT.get()
        if collection is None:
            return await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more)
        asked = {TOPK: collection.k, KEPT: collection.max_kept if is_truncated(sampling_params) else 0}
        if any(asked.values()):
            asked = {name: number for name, number in asked.items() if number}
            sampling_params = {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), **asked}}
        output = await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more)
        # Removed here: verl would carry the first request's arrays with the sequence.
        fields = [output.extra_fields.pop(name, None) for name in (TOPK_IDS, TOPK_LOGP, KEPT_IDS, KEPT_COUNTS)]
        if output.token_ids:
            topk = None if fields[0] is None else (fields[0], fields[1])
            kept = None if fields[2] is None else KeptColumn(fields[2], fields[3])
            version = output.extra_fields.get("global_steps")
            collection.pieces.append(Piece(list(prompt_ids), list(output.token_ids), version, topk, kept))
        return output

    generate.collects = True  # pyright: ignore[reportAttributeAccessIssue]
    LLMServerClient.generate = generate


def is_truncated(sampling_params: Mapping[str, Any]) -> bool:
    """Returns whether a request's tokens are drawn from a part of the vocabulary."""
    top_p, top_k, min_p = (sampling_params.get(name) for name in ("top_p", "top_k", "min_p"))
    return (top_p or 1.0) < 1.0 or (top_k or 0) > 0 or (min_p or 0.0) > 0.0


def place(collection: Collection, prompt_ids: list[int], response_ids: list[int], response_mask: list[int]) -> Placed:
    """Returns the records of one response.

    Args:
        collection: All pieces of the loop that made the response. Those of other responses are left out.
        prompt_ids: The ids of the response's prompt.
        response_ids: The ids of the response, perhaps cut at the end.
        response_mask: 1 on the tokens in the loss.

    Raises:
        EngineError: If a token in the loss is in no piece, or if truncation kept more ids than are recorded.
        MissingDataError: If a server returned no top-K.
    """
    k, length, sequence = collection.k, len(response_ids), [*prompt_ids, *response_ids]
    placed = Placed(
        np.full(length, NOT_SAMPLED, np.int32), np.full(length, NOT_SAMPLED, np.int32),
        np.full((length, k), NOT_SAMPLED, np.int32), np.full((length, k), -np.inf, np.float32), [()] * length,
    )  # fmt: skip
    turn = 0
    for piece in collection.pieces:
        start = len(piece.prompt_ids) - len(prompt_ids)
        rows = min(len(piece.token_ids), length - start)
        if start < 0 or rows <= 0 or sequence[: len(piece.prompt_ids)] != piece.prompt_ids:
            continue
        if response_ids[start : start + rows] != piece.token_ids[:rows]:
            continue
        at = slice(start, start + rows)
        placed.turn[at] = turn
        placed.version[at] = NOT_SAMPLED if piece.version is None else piece.version
        turn += 1
        if k:
            _place_topk(placed, piece, at, k)
        if piece.kept is not None:
            check_limit(piece.kept, collection.max_kept)
            placed.kept[at] = piece.kept.rows()[:rows]
    lost = int(np.sum((placed.turn == NOT_SAMPLED) & (np.asarray(response_mask) != 0)))
    if lost:
        raise EngineError(
            f"Every token in the loss must be one that the sampler drew, got {lost} of {length} that are in no "
            "request's answer. The agent loop must keep the sampled ids and must not tokenize the text again."
        )
    return placed


def _place_topk(placed: Placed, piece: Piece, at: slice, k: int) -> None:
    if piece.topk is None or piece.topk[0].shape[-1] < k or len(piece.topk[0]) != len(piece.token_ids):
        found = None if piece.topk is None else piece.topk[0].shape
        raise MissingDataError(
            f"The sampler must return its {k} most probable ids at each of {len(piece.token_ids)} tokens, got {found}. "
            "Start the run with `python -m trustrl.engines.verl`, which installs a server that does."
        )
    rows = at.stop - at.start
    placed.topk_ids[at], placed.topk_logp[at] = piece.topk[0][:rows, :k], piece.topk[1][:rows, :k]
