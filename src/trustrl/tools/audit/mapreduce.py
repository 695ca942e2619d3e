"""Counting over many record files: in one process, in several, or on a Ray cluster, with identical counts."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from multiprocessing import active_children, get_context
from operator import add
from typing import Any, Literal, Protocol, Self, TypeVar

import torch

from trustrl.config import validators
from trustrl.errors import RecordError
from trustrl.optional_imports import need
from trustrl.recording import Piece, stream
from trustrl.recording.storage import Place, address_of, place
from trustrl.terminal import escape_warnings

Where = Literal["processes", "ray"]
GROUPS_PER_WORKER = 4
"""File groups per worker. Several groups balance small and large files."""

ROWS_PER_PIECE = 131_072
"""Rows that are counted at once. A piece costs about 500 calls into torch, however few rows it has."""


class Summary(Protocol):
    """Summary of a piece, such as `TokenCounts`. `a + b` is the summary of both pieces."""

    def __add__(self, other: Self) -> Self:
        """Returns the summary of both."""
        ...

    def to_bytes(self) -> bytes:
        """Serializes the summary for another process."""
        ...

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Loads a summary that `to_bytes` wrote, without executing code."""
        ...


S = TypeVar("S", bound=Summary)


def count_records(
    files: Sequence[Place],
    of: Callable[[Piece], S],
    *,
    kind: type[S],
    columns: Sequence[str],
    workers: int = 1,
    where: Where = "processes",
) -> S:
    """Applies `of` to each piece of the files and returns the sum of the summaries.

    Args:
        files: Part files. On Ray, every machine must reach them under these paths or addresses.
        of: Function that other processes can import. Bind further arguments with `functools.partial`.
        kind: Class of the summaries that `of` returns.
        columns: Columns that `of` reads.
        workers: Number of parallel processes; on Ray, of parallel file groups.
        where: `processes` on this machine (only the current one if `workers` is 1), or `ray` through Ray Data.

    Raises:
        RecordError: If the files have no tokens, or a file is not a record file.
        MissingPackageError: If pyarrow or Ray is not installed.
    """
    validators.whole("--workers", workers, low=1)
    groups = [list(files[start :: workers * GROUPS_PER_WORKER]) for start in range(workers * GROUPS_PER_WORKER)]
    work = partial(_of_group, of=of, columns=tuple(columns))
    groups = [group for group in groups if group]
    if where == "ray":
        total = _sum(_on_ray(groups, work, kind))
    elif workers == 1:
        total = work(files)
    else:
        total = _sum(_in_processes(groups, work, workers, kind))
    if total is None:
        raise RecordError("The records must contain at least one token, got none.")
    return total


def _of_group(files: Sequence[Place], of: Callable[[Piece], S], columns: Sequence[str]) -> S | None:
    return _sum(of(piece) for piece in stream(files, columns=columns, rows=ROWS_PER_PIECE))


def _sum(parts: Iterable[S | None]) -> S | None:
    summaries = (part for part in parts if part is not None)
    first = next(summaries, None)
    return None if first is None else reduce(add, summaries, first)


def _in_processes(groups: list[list[Place]], work: Any, workers: int, kind: type[S]) -> Iterator[S | None]:
    # Spawned, not forked: torch's threads do not survive a fork.
    others = set(active_children())
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool:
        try:
            with _interrupts_held_back():
                parts = deque(pool.submit(_as_bytes, group, work) for group in groups)
            while parts:
                data = parts.popleft().result()  # freed once merged, so that memory stays flat
                yield None if data is None else kind.from_bytes(data)
        except BaseException:  # the remaining results are not needed
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delays Ctrl-C until after this block. Processes started in it ignore Ctrl-C, and the parent terminates them.

    Ctrl-C reaches every process of a terminal, and a worker that is loading torch would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # child processes inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Prepares a worker process."""
    torch.set_num_threads(1)
    escape_warnings()


def _as_bytes(files: Sequence[Place], work: Any) -> bytes | None:
    summary = work(files)
    return None if summary is None else summary.to_bytes()


def _on_ray(groups: list[list[Place]], work: Any, kind: type[S]) -> Iterator[S | None]:
    ray, data = need("ray", extra="ray"), need("ray.data", extra="ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    data.DataContext.get_current().enable_progress_bars = False
    items = [{"files": [address_of(file) for file in group]} for group in groups]
    for row in data.from_items(items, override_num_blocks=len(items)).map(partial(_of_row, work=work)).iter_rows():
        yield kind.from_bytes(row["summary"]) if row["summary"] else None


def _of_row(row: dict[str, Any], work: Any) -> dict[str, bytes]:
    torch.set_num_threads(1)
    return {"summary": _as_bytes([place(file) for file in row["files"]], work) or b""}
