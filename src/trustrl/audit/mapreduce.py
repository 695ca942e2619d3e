"""Summaries over files: in a stream, in several processes, or on a Ray cluster; the counts are the same."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Literal

import torch

from trustrl.audit.summary import Summary
from trustrl.config import checks
from trustrl.errors import RecordError
from trustrl.packages import need
from trustrl.recording import Piece, stream

Where = Literal["processes", "ray"]
GROUPS_PER_WORKER = 4
"""Enough that a worker with small files does not wait for one with large files."""


def summarised(
    files: Sequence[Path],
    of: Callable[[Piece], Summary],
    *,
    columns: Sequence[str],
    workers: int = 1,
    where: Where = "processes",
) -> Summary:
    """`of` each piece of the files, added up.

    Args:
        files: part files; on Ray, where every machine sees them under these names.
        of: a function that other processes can import, with `functools.partial` around it if it takes more.
        columns: what it reads.
        workers: processes at a time; on Ray, groups of files at a time.
        where: `processes` on this machine, none beside this one where `workers` is 1; or `ray`, through Ray Data.

    Raises:
        RecordError: there is no token, or a file is not one of ours.
        MissingPackageError: pyarrow or Ray is not installed.
    """
    checks.whole("--workers", workers, low=1)
    groups = [list(files[at :: workers * GROUPS_PER_WORKER]) for at in range(workers * GROUPS_PER_WORKER)]
    work = partial(_of_group, of=of, columns=tuple(columns))
    groups = [group for group in groups if group]
    if where == "ray":
        parts = _on_ray(groups, work)
    elif workers == 1:
        parts = iter([_of_group(files, of, columns)])
    else:
        parts = _in_processes(groups, work, workers)
    total: Summary | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    if total is None:
        raise RecordError("The records must hold at least one token, got none.")
    return total


def _of_group(files: Sequence[Path], of: Callable[[Piece], Summary], columns: Sequence[str]) -> Summary | None:
    total: Summary | None = None
    for piece in stream(files, columns=columns):
        total = of(piece) if total is None else total + of(piece)
    return total


def _in_processes(groups: list[list[Path]], work: Any, workers: int) -> Iterator[Summary | None]:
    # Started afresh, not forked: torch's threads do not survive a fork.
    others = set(active_children())
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            with _interrupts_held_back():
                parts = deque(pool.submit(_as_bytes, group, work) for group in groups)
            while parts:
                found = parts.popleft().result()  # gone once it is merged: memory stays flat
                yield None if found is None else Summary.from_bytes(found)
        except BaseException:  # nobody waits for the rest
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes after this block; processes started in it never see one, and we end them.

    It reaches all of a terminal's processes, and a worker that loads torch would answer with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_bytes(files: Sequence[Path], work: Any) -> bytes | None:
    found = work(files)
    return None if found is None else found.to_bytes()


def _on_ray(groups: list[list[Path]], work: Any) -> Iterator[Summary | None]:
    ray, data = need("ray", extra="ray"), need("ray.data", extra="ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    data.DataContext.get_current().enable_progress_bars = False
    items = [{"files": [str(file) for file in group]} for group in groups]
    for row in data.from_items(items, override_num_blocks=len(items)).map(partial(_of_row, work=work)).iter_rows():
        yield Summary.from_bytes(row["summary"]) if row["summary"] else None


def _of_row(row: dict[str, Any], work: Any) -> dict[str, bytes]:
    torch.set_num_threads(1)
    return {"summary": _as_bytes([Path(file) for file in row["files"]], work) or b""}
