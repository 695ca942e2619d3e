"""Records log μ while vLLM decodes: the sampled token and the K most probable ids, as arrays.

vLLM's engine sends its frontend one numpy table per step and request. The frontend then creates a Python object for
every number. A request with `extra_args={REQUEST: True}` gets a processor that copies the tables into one growing array
instead:

    install()
    llm.generate(prompts, SamplingParams(logprobs=K, detokenize=False, extra_args={REQUEST: True}))
    ids, logp = output.outputs[0].logprobs.table()  # (T, 1 + K) each, the sampled token first

With `**recording(K, max_kept=M)` instead, the record also has the ids that top-p, top-k, or min-p kept, at most M per
token. vLLM must return processed log-probs then: removed ids have the log-prob −inf in them. If the engine runs in this
process on a CPU, `install` after its start has the sampler send the kept ids alone (see `kept_in_engine`).

This works in `LLM`, in `AsyncLLM`, and in vLLM's servers, because all of them create requests in `from_new_request`.
The engine, the scheduler, and the wire format do not change. Requests without the mark are not affected.

Seam: `LogprobsProcessor.from_new_request(tokenizer, request)` and `_update_sample_logprobs(logprobs_lists)`. `install`
checks both. vLLM calls `plugin` in all of its processes through the entry point `vllm.general_plugins`.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Self, overload

import numpy as np

from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.sampler_fields import KEPT, TOPK
from trustrl.errors import EngineError

logger = logging.getLogger(__name__)

REQUEST = "trustrl_record"
"""The key of `SamplingParams.extra_args` that marks a request."""

BLOCK = 64
"""Steps of a request whose rows wait, to be copied at once: most of the time of a copy is its start."""

RUNNER = "vllm.v1.worker.gpu_model_runner"
"""vLLM's module that samples. A process that has imported it runs an engine."""

Table = tuple[np.ndarray, np.ndarray]
"""(T, 1 + K) int32 ids and (T, 1 + K) float32 log-probs. Column 0 is the sampled token, the rest is by rank."""


def recording(k: int, *, max_kept: int = 0, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the sampling parameters of a request that is recorded.

    Args:
        k: The number of ids to record at each token, most probable first.
        max_kept: The largest number of ids that truncation may keep, if kept ids are recorded. Without
            `kept_in_engine`, vLLM then sends 8 (max_kept + 2) bytes per token from its engine to its frontend, which
            keeps the ids that are left.
        more: Other entries of the request's `extra_args`.
    """
    extra = {**(more or {}), REQUEST: True}
    if not max_kept:
        return {"logprobs": k, "extra_args": extra}
    # The columns after the first K only show which ids were kept, and one more shows if there are others.
    return {"logprobs": max(k, max_kept + 1), "extra_args": {**extra, TOPK: k, KEPT: max_kept}}


class KeptIds:
    """Ids that truncated sampling kept at each token of one completion, 4 bytes per id and 8 per token."""

    __slots__ = ("_ends", "_ids", "_length", "max_kept")

    def __init__(self, max_kept: int) -> None:
        self.max_kept = max_kept
        # Arrays that double, because a Python object for every number is what this module avoids.
        self._ids, self._ends, self._length = np.empty(64, np.int32), np.zeros(32, np.int64), 0

    def add(self, kept: np.ndarray) -> None:
        """Appends the kept ids of one token."""
        start = self._ends[self._length]
        end = start + len(kept)
        if end > len(self._ids):
            self._ids = _grown(self._ids, max(end, 2 * len(self._ids)))
        if self._length + 1 == len(self._ends):
            self._ends = _grown(self._ends, 2 * len(self._ends))
        self._ids[start:end] = kept
        self._length += 1
        self._ends[self._length] = end

    def column(self, first: int, last: int) -> KeptColumn:
        """Returns the ids kept at these tokens, in any order; `max_kept` + 1 if there are more."""
        ends = self._ends[first : last + 1]
        return KeptColumn(self._ids[ends[0] : ends[-1]], np.diff(ends).astype(np.int32))


class DecodedLogprobs(Sequence[Any]):
    """Log-probs of one completion, 8 (1 + K) + 4 bytes per token.

    Args:
        width: 1 + K.
        capacity: The number of tokens to reserve memory for.
        max_kept: The largest number of kept ids per token; 0 if they are not recorded.

    Iteration yields the sampled token alone. TRL sorts each position by rank and takes the first entry, so a longer
    position would give it the log-prob of another token. Indexing returns the whole position, as vLLM's lists do.
    """

    __slots__ = ("_first", "_ids", "_kept", "_length", "_logp", "_ranks", "_total", "_waiting", "experts")

    experts: np.ndarray | None
    """(T, layers × experts per token) int16: the routing behind each log-prob; see `routed_experts`."""

    def __init__(self, width: int, capacity: int = 32, *, max_kept: int = 0) -> None:
        self._kept = KeptIds(max_kept) if max_kept else None
        self._first = 0  # of a slice, in the kept ids of the whole
        self.experts = None
        self._ids = np.empty((capacity, width), np.int32)
        self._logp = np.empty((capacity, width), np.float32)
        self._ranks = np.empty(capacity, np.int32)
        self._length, self._total = 0, 0.0
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, ids: np.ndarray, logp: np.ndarray, ranks: np.ndarray) -> None:
        """Appends the rows of one step: one token, or several after speculative decoding.

        A batch has as many columns as its widest request. `kept_in_engine` appends kept ids to the row of ids.
        """
        self._waiting.append((ids, logp, ranks))
        # Rows that wait keep their whole batch in memory, so those wider than this record do not.
        if len(self._waiting) == BLOCK or logp.shape[1] > self._ids.shape[1]:
            self._write()

    def _write(self) -> None:
        """Copies the rows that wait."""
        parts, self._waiting = self._waiting, []
        if not parts:
            return
        start, width = self._length, self._ids.shape[1]
        end = start + sum(len(ranks) for _, _, ranks in parts)
        if end > len(self._ids):
            capacity = max(end, 2 * len(self._ids))
            self._ids, self._logp, self._ranks = (_grown(old, capacity) for old in (self._ids, self._logp, self._ranks))
        every_ids, every_logp, every_rank = zip(*parts, strict=True)
        np.concatenate(_cut(every_ids, width), out=self._ids[start:end])
        np.concatenate(_cut(every_logp, width), out=self._logp[start:end])
        np.concatenate(every_rank, out=self._ranks[start:end], casting="unsafe")
        self._length = end
        self._total += float(self._logp[start:end, 0].sum(dtype=np.float64))
        if self._kept is not None:
            for ids, logp, _ in parts:
                self._add_kept(self._kept, ids, logp)

    @staticmethod
    def _add_kept(kept: KeptIds, ids: np.ndarray, logp: np.ndarray) -> None:
        columns = logp.shape[1]
        if ids.shape[1] > columns:
            kept.add(ids[0, columns:])
            return
        room = kept.max_kept + 2  # the sampled token, the ids that may be kept, and one that shows if there are others
        for row_ids, row_logp in zip(ids[:, 1:room], logp[:, 1:room], strict=True):
            kept.add(row_ids[row_logp > -np.inf])

    @property
    def total(self) -> float:
        """The sum of the sampled tokens' log-probs."""
        self._write()
        return self._total

    def table(self) -> Table:
        """Returns ids and log-probs without a copy."""
        self._write()
        return self._ids[: self._length], self._logp[: self._length]

    def kept(self) -> KeptColumn | None:
        """Returns the ids that truncation kept at each token; None if they were not asked for."""
        self._write()
        return None if self._kept is None else self._kept.column(self._first, self._first + self._length)

    @property
    def max_kept(self) -> int:
        """The largest number of kept ids per token that is recorded; 0 if none are."""
        return 0 if self._kept is None else self._kept.max_kept

    @classmethod
    def from_lists(cls, tokens: list[int], ids: list[list[int]], logp: list[list[float | None]], k: int) -> Self:
        """Returns the record of one completion from a vLLM server's lists, as TRL's client returns them.

        Args:
            tokens: The sampled tokens.
            ids: The ids at each position, most probable first: the K most probable and the sampled token.
            logp: Their log-probs; None is NaN.
            k: K.

        Raises:
            EngineError: If a position does not hold the sampled token and K ids.
        """
        record = cls(1 + k, capacity=len(tokens))
        for t, (token, row, values) in enumerate(zip(tokens, ids, logp, strict=True)):
            if token not in row or len(row) < k:
                raise EngineError(
                    f"The vLLM server must return the sampled token and {k} ids at each position, got {len(row)} ids "
                    f"at position {t}. Start it with --max-logprobs {max(k, 20)} or more."
                )
            own = row.index(token)
            numbers = [np.nan if value is None else value for value in values]
            record._ids[t] = [token, *row[:k]]
            record._logp[t] = [numbers[own], *numbers[:k]]
            record._ranks[t] = own + 1
        record._length = len(tokens)
        return record

    def extend(self, following: Self) -> None:
        """Appends the slice that follows this one, as vLLM does with parts that nobody has read yet.

        Both are slices of one record, whose kept ids they share.
        """
        own = (*self.table(), self._ranks[: self._length])
        other = (*following.table(), following._ranks[: following._length])
        self._ids, self._logp, self._ranks = (np.concatenate(pair) for pair in zip(own, other, strict=True))
        self._length = len(self._ids)

    def __len__(self) -> int:
        self._write()
        return self._length

    def __iter__(self) -> Iterator[Any]:
        logprob = import_module("vllm.logprobs").Logprob
        rows = zip(self.table()[0][:, 0].tolist(), self.values(), self._ranks[: self._length].tolist(), strict=True)
        for token, value, rank in rows:
            yield {token: logprob(value, rank)}

    def values(self) -> "Iterator[RecordedLogprob]":
        """Yields the log-prob of each sampled token."""
        for position, value in enumerate(self.table()[1][:, 0].tolist()):
            yield RecordedLogprob(value, self, position)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        ids, logp = self.table()
        ranks = self._ranks[: self._length]
        if isinstance(index, slice):
            part = type(self)(ids.shape[1], capacity=0)
            part._ids, part._logp, part._ranks = ids[index], logp[index], ranks[index]
            part._length = len(part._ids)
            part._kept, part._first = self._kept, self._first + index.indices(self._length)[0]
            return part
        logprob = import_module("vllm.logprobs").Logprob
        by_rank = [int(ranks[index]), *range(1, ids.shape[1])]
        rows = zip(ids[index].tolist(), logp[index].tolist(), by_rank, strict=True)
        position: dict[int, Any] = {}
        for token, value, rank in rows:
            position.setdefault(token, logprob(value, rank))
        return position


class RecordedLogprob(float):
    """The log-prob of a sampled token, with a reference to its row.

    The reference stays with the number through an engine's lists, however the engine cuts and joins them.
    """

    __slots__ = ("position", "source")

    source: DecodedLogprobs
    position: int

    def __new__(cls, value: float, source: DecodedLogprobs, position: int) -> Self:
        """Creates the number."""
        self = super().__new__(cls, value)
        self.source, self.position = source, position
        return self


def _cut(parts: Sequence[np.ndarray], width: int) -> Sequence[np.ndarray]:
    """Returns the first columns of each part. Most batches have no more, and a slice costs more than the copy."""
    if all(part.shape[1] == width for part in parts):
        return parts
    return [part[:, :width] for part in parts]


def _grown(old: np.ndarray, capacity: int) -> np.ndarray:
    new = np.empty((capacity, *old.shape[1:]), old.dtype)
    new[: len(old)] = old
    return new


def install() -> None:
    """Makes vLLM return `DecodedLogprobs` for marked requests, in this process. Later calls have no effect.

    Raises:
        EngineError: If the installed vLLM creates log-probs in another way.
    """
    module: Any = import_module("vllm.v1.engine.logprobs")
    processor = module.LogprobsProcessor
    # Only if the engine runs in this process: its modules must not be imported before vLLM forks.
    if RUNNER in sys.modules and import_module("vllm.platforms").current_platform.is_cpu():
        import_module("trustrl.engines.vllm.kept_in_engine").install()
    original = processor.from_new_request.__func__
    # Installed before: vLLM loads plugins in every process, and trainers call this too.
    if hasattr(original, "processor"):
        return
    _check_seam(processor)

    class ArrayProcessor(processor):
        """vLLM's processor, with arrays instead of Python objects."""

        def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
            ids, logp, ranks = logprobs_lists[:3]
            self.logprobs.add(ids, logp, ranks)

        @property
        def cumulative_logprob(self) -> float:
            return self.logprobs.total

        @cumulative_logprob.setter
        def cumulative_logprob(self, value: float) -> None:
            """Ignores the 0 with which vLLM begins: the record has the sum."""

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        created = original(cls, tokenizer, request)
        wanted = created.num_logprobs
        if wanted is None or wanted < 0 or not (request.sampling_params.extra_args or {}).get(REQUEST):
            return created
        values = {field.name: getattr(created, field.name) for field in fields(created)}
        asked = request.sampling_params.extra_args
        record = DecodedLogprobs(1 + wanted)
        if asked.get(KEPT):
            record = DecodedLogprobs(1 + asked[TOPK], max_kept=asked[KEPT])
        return ArrayProcessor(**{**values, "logprobs": record})

    from_new_request.processor = ArrayProcessor  # pyright: ignore[reportFunctionMemberAccess]
    processor.from_new_request = classmethod(from_new_request)


def plugin() -> None:
    """Calls `install` in a vLLM process that trustrl did not start, and never raises.

    With a vLLM that trustrl does not support, it logs one warning. Only marked requests need it, and trustrl calls
    `install` before it marks one.
    """
    try:
        install()
    except Exception as error:
        logger.warning("trustrl does not record log-probs in this vLLM, and changes nothing: %s", error)


def _check_seam(processor: Any) -> None:
    import_error = "Install a vllm version listed in trustrl's documentation."
    wanted = {"from_new_request": ["tokenizer", "request"], "_update_sample_logprobs": ["self", "logprobs_lists"]}
    for name, parameters in wanted.items():
        names = list(inspect.signature(getattr(processor, name)).parameters) if hasattr(processor, name) else None
        if names != parameters:
            raise EngineError(
                f"vLLM's LogprobsProcessor.{name} must have the parameters {parameters}, got {names}. {import_error}"
            )
    lists = list(import_module("vllm.v1.outputs").LogprobsLists._fields)[:3]
    if lists != ["logprob_token_ids", "logprobs", "sampled_token_ranks"]:
        raise EngineError(f"vLLM's LogprobsLists must start with ids, log-probs and ranks, got {lists}. {import_error}")
