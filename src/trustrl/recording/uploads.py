"""Uploads of a record to an object store, by a thread that empties a spool on the local disk. No torch.

A recorder writes its files into its folder of the spool, under the names that they have in the record. The thread
uploads them in that order and deletes each one that the store has taken. So training never waits for the store, and
files that are left when a process ends are uploaded by the next process of the same record and rank, or by
`trustrl.recording.spool.upload_left`.
"""

import atexit
import os
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from trustrl.errors import TrustRLWarning
from trustrl.recording.spool import (
    held,
    impatient,
    new_folder,
    remove_empty,
    spool_of,
    upload,
    upload_folder,
)  # fmt: skip
from trustrl.recording.storage import Remote

FIRST_WAIT, LONGEST_WAIT, AWAITED_WAIT = 1.0, 60.0, 4.0
"""Seconds before the first retry, at most, and at most at the end of a run. Each wait is twice the last, less up to
half of it at random."""

OUTAGE = 3
"""Number of failed attempts in a row from which the store counts as failing."""

FLUSH_SECONDS = 60.0
"""Seconds that the end of a run waits for the store."""


class _Waiting(NamedTuple):
    """File that waits for its upload."""

    file: Path
    size: int


class Uploads:
    """Files of one recorder on their way to an object store.

    Nothing here waits for the store except `flush`. Messages of the thread are warned by the next `say` or `flush`, in
    the thread that calls it.

    Args:
        where: The folder of the record.
        rank: The rank of the recorder.
        spool: The folder that holds all spools; see `spool_of`.
        max_bytes: Size from which the spool is full.

    Raises:
        ConfigError: If the spool belongs to another user.
        OSError: If it cannot be created.
    """

    def __init__(self, where: Remote, *, rank: int, spool: str | None, max_bytes: int) -> None:
        self._where = self.store = impatient(where)
        self._rank, self._max_bytes = rank, max_bytes
        self._root = spool
        self._spool = spool_of(where, spool)
        self._own, self._lock = new_folder(self._spool, rank)
        self.folder = Remote(where.address, where.filesystem, where.path, self)
        """The record's folder. Files written there wait in the spool until they are uploaded."""

        self._changed = threading.Condition()
        self._queue: deque[_Waiting | Callable[[], list[str]]] = deque()
        """Files, and other work at the store, which returns messages."""
        self._used = 0
        self._made: set[str] = set()
        self._thread: threading.Thread | None = None
        self._num_failed = 0
        self._failing_since = 0.0
        self._is_awaited = False
        """True while `flush` waits. Retries are then at most `AWAITED_WAIT` apart."""
        self._news: list[str] = []
        self._told: list[_Waiting | Callable[[], list[str]]] = []
        """Jobs that the last `flush` left and named."""
        self._ends = False
        self._process = os.getpid()
        if not _OPEN:
            # After `impatient` has imported pyarrow, whose own exit closes its connections: what is registered last
            # runs first.
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _OPEN.add(self)

    def check_room(self) -> None:
        """Raises an OSError if the spool is full."""
        if self._used >= self._max_bytes:
            raise OSError(f"the spool `{self._own}` is full ({self._used:,} bytes in {len(self._queue):,} files wait)")

    def local(self, where: Remote) -> Path:
        """Returns the path at which a file or folder of the record waits."""
        return self._own / where.path.removeprefix(self._where.path).lstrip("/")

    def begin(self) -> None:
        """Uploads, in the thread, the files that earlier processes of this rank left in the spool."""
        self._append(self._send_left)

    def then(self, job: Callable[[], list[str]]) -> None:
        """Does a job in the thread, after everything before it. It returns messages, which are warned."""
        self._append(job)

    def submit(self, file: Path) -> None:
        """Takes a complete file to upload it later. Does not wait."""
        self._append(_Waiting(file, file.stat().st_size))

    def _append(self, job: _Waiting | Callable[[], list[str]]) -> None:
        with self._changed:
            self._queue.append(job)
            self._used += job.size if isinstance(job, _Waiting) else 0
            self._start()

    def _start(self) -> None:
        if self._thread is None and self._queue:
            thread = threading.Thread(target=self._run, name="trustrl-uploads", daemon=True)
            with suppress(RuntimeError):  # the system allows no more threads now; the next file tries again
                thread.start()
                self._thread = thread

    def say(self) -> None:
        """Warns about outages that began or ended since the last call."""
        with self._changed:
            news, self._news = self._news, []
        for text in news:
            warnings.warn(text, TrustRLWarning, stacklevel=4)

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Waits until the store has every file, at most this long. Then warns about files that are left."""
        if self._process != os.getpid():
            return  # a forked process has no thread
        last = time.monotonic() + seconds
        with self._changed:
            self._is_awaited = True
            self._start()
            self._changed.notify_all()  # ends the wait before a retry
            while self._queue and (rest := last - time.monotonic()) > 0:
                self._changed.wait(rest)
            self._is_awaited = False
            pending = list(self._queue)
        self.say()
        left = [job for job in pending if isinstance(job, _Waiting)]
        if left and pending != self._told:
            more = "" if self._root is None else f" --spool {self._spool.parent}"
            query = ", with the query of its address" if "?" in self._where.address else ""
            warnings.warn(
                f"`{self._where}` lacks {len(left):,} files of this record, which it did not take in time. They wait "
                f"in `{self._own}`. The next process of this record and rank uploads them, or when this one has ended: "
                f"`trustrl records upload {self._where}{more}`{query}.",
                TrustRLWarning,
                stacklevel=3,
            )
        self._told = pending

    def end(self, seconds: float) -> None:
        """Flushes, stops the thread and removes an empty spool."""
        if self._process != os.getpid():
            return
        self.flush(0.0 if self._queue and list(self._queue) == self._told else seconds)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        remove_empty(self._own)

    def _run(self) -> None:
        """Does the jobs in order, each until it succeeds."""
        while True:
            with self._changed:
                if not self._queue or self._ends:
                    self._thread = None
                    return
                job = self._queue[0]
            try:
                messages = self._put(job) if isinstance(job, _Waiting) else job()
            except Exception as error:
                self._failed(error)
                continue
            with self._changed:
                self._queue.popleft()
                self._news += messages
                self._succeeded()
                self._changed.notify_all()

    def _put(self, waiting: _Waiting) -> list[str]:
        messages = []
        try:
            source = waiting.file.open("rb")
        except FileNotFoundError:
            messages = [f"Another program deleted `{waiting.file}` before its upload. Its rows are lost."]
        else:
            with source:
                upload(source, self._where, waiting.file.relative_to(self._own), self._made)
            waiting.file.unlink(missing_ok=True)
        with self._changed:
            self._used -= waiting.size
        return messages

    def _send_left(self) -> list[str]:
        messages = []
        for folder in sorted(self._spool.glob(f"rank-{self._rank:04d}.*")):
            with held(folder) as is_free:
                if is_free:
                    messages += upload_folder(folder, self._where, self._made)[1]
        return messages

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._num_failed += 1
            if self._num_failed == 1:
                self._failing_since = time.monotonic()
            if self._num_failed == OUTAGE:
                self._news.append(
                    f"Cannot upload records to `{self._where}`: {str(error).rstrip('.')}. They wait in `{self._own}` "
                    f"until the store takes them again, at most {self._max_bytes:,} bytes; training continues."
                )
            longest = AWAITED_WAIT if self._is_awaited else LONGEST_WAIT
            wait = min(longest, FIRST_WAIT * 2.0 ** min(self._num_failed - 1, 30))
            self._changed.wait(wait * random.uniform(0.5, 1.0))  # ranks must not return all at once

    def _succeeded(self) -> None:
        if self._num_failed >= OUTAGE:
            self._news.append(
                f"`{self._where}` takes records again after {time.monotonic() - self._failing_since:,.0f} s. "
                f"{len(self._queue) + 1:,} files waited for that and are uploaded now."
            )
        self._num_failed = 0


_OPEN: "WeakSet[Uploads]" = WeakSet()


def _end_all() -> None:
    """Ends the uploads of this process at its exit."""
    last = time.monotonic() + FLUSH_SECONDS
    for uploads in list(_OPEN):
        uploads.end(max(0.0, last - time.monotonic()))
