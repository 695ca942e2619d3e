"""Uploads of a record to an object store: a spool on the local disk, and a thread that empties it. No torch.

A recorder writes its files into a folder of its own in the spool, under the names that they have in the record. The
thread uploads them in that order and deletes each one that the store has taken. So training never waits for the store,
and what is there when a process ends is uploaded by the next process of the same record and rank, or by `upload_left`.

    SPOOL/NAME-HASH/rank-0000.TIME-PID/     one recorder. It holds a lock on `.lock` until it ends
        step-00000012.rank-0000.parquet     files that wait, laid out as in the record
        .take-back                          step whose old files are yet to be deleted in the store
"""

import atexit
import hashlib
import os
import random
import stat
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import IO, NamedTuple
from urllib.parse import parse_qs
from weakref import WeakSet

from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import checked_file, checked_json
from trustrl.recording.record_files import remove_from
from trustrl.recording.storage import Remote

try:
    import fcntl
except ImportError:  # Windows has no such locks, so only `upload_left` takes what another process left
    fcntl = None

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first retry and between the last ones. Each retry waits twice as long, less a random half."""

OUTAGE = 3
"""Number of failed attempts in a row from which the store counts as failing."""

FLUSH_SECONDS = 60.0
"""Seconds that the end of a run waits for the store."""

_LOCK, _TAKE_BACK = ".lock", ".take-back"


def impatient(where: Remote) -> Remote:
    """Returns the place through a client that raises after one attempt, for callers that retry themselves.

    pyarrow's client for S3 gives up on a hanging server after 10 s for each of three attempts, and holds back the end
    of the process until then.
    """
    if where.filesystem.type_name != "s3":
        return where
    fs = need("pyarrow.fs", extra="records")
    _, (settings,) = where.filesystem.__reduce__()
    once = fs.S3FileSystem(**settings, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1))
    return Remote(where.address, once, where.path)


def spool_of(where: Remote, folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder in which the files of one record wait. Creates it.

    Args:
        where: The folder of the record.
        folder: The folder that holds all spools. None stands for one in `TMPDIR` that no other user can read.

    Raises:
        ConfigError: If the folder in `TMPDIR` belongs to another user.
        OSError: If it cannot be created.
    """
    endpoint = parse_qs(where.address.partition("?")[2]).get("endpoint_override", [""])[0]
    name = hashlib.sha256(f"{where} {endpoint}".encode()).hexdigest()[:12]  # keys may change
    root = Path(gettempdir(), f"trustrl-spool-{_user()}") if folder is None else Path(folder).expanduser().absolute()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder is None:
        about = root.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.stat(root).st_uid or about.st_uid not in (_user(), 0):
            raise ConfigError(f"`{root}` must be a folder of yours, got another user's. Set recording.spool.")
    spool = root / f"{where.name}-{name}"
    spool.mkdir(exist_ok=True)
    return spool


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


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
        self._where = impatient(where)
        self._rank, self._max_bytes = rank, max_bytes
        self._root = spool
        self._spool = spool_of(where, spool)
        name = f"rank-{rank:04d}.{time.time_ns():020d}-{os.getpid()}"
        hidden = self._spool / f".{name}"
        hidden.mkdir(mode=0o700)
        self._lock = _locked(hidden)  # before others see the folder
        self._own = hidden.rename(self._spool / name)
        self.folder = Remote(where.address, where.filesystem, where.path, self)
        """The record's folder. Files written there wait in the spool until they are uploaded."""

        self._changed = threading.Condition()
        self._queue: deque[_Waiting | int] = deque()
        """Files, and the step from which on the old files of this rank must go first."""
        self._used = 0
        self._made: set[str] = set()
        self._thread: threading.Thread | None = None
        self._num_failed = 0
        self._failing_since = 0.0
        self._news: list[str] = []
        self._told: list[_Waiting | int] = []
        """What the last `flush` left and named."""
        self._ends = False
        self._process = os.getpid()
        _OPEN.add(self)

    def check_room(self) -> None:
        """Raises an OSError if the spool is full."""
        if self._used >= self._max_bytes:
            raise OSError(f"the spool `{self._own}` is full ({self._used:,} bytes in {len(self._queue):,} files wait)")

    def local(self, where: Remote) -> Path:
        """Returns the path at which a file or folder of the record waits."""
        return self._own / where.path.removeprefix(self._where.path).lstrip("/")

    def begin(self, step: int) -> None:
        """Has the thread delete what an earlier process of this rank recorded of this step and of later ones.

        It first uploads what that process left in the spool of earlier steps.
        """
        (self._own / _TAKE_BACK).write_text(f"{step}\n")
        self._append(step)

    def submit(self, file: Path) -> None:
        """Takes a complete file to upload it later. Does not wait."""
        self._append(_Waiting(file, file.stat().st_size))

    def _append(self, job: _Waiting | int) -> None:
        with self._changed:
            self._queue.append(job)
            self._used += 0 if isinstance(job, int) else job.size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trustrl-uploads", daemon=True)
                self._thread.start()

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
            self._changed.notify_all()  # ends the wait before a retry
            while self._queue and (rest := last - time.monotonic()) > 0:
                self._changed.wait(rest)
            pending = list(self._queue)
        self.say()
        left = [job for job in pending if isinstance(job, _Waiting)]
        if left and pending != self._told:
            more = "" if self._root is None else f" --spool {self._spool.parent}"
            query = ", with the query of its address" if "?" in self._where.address else ""
            warnings.warn(
                f"`{self._where}` lacks {len(left):,} files of this record, which it did not take in time. They wait in "
                f"`{self._own}`. The next process of this record and rank uploads them, or when this one has ended: "
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
        _remove_empty(self._own)

    def _run(self) -> None:
        """Does the jobs in order, each until it succeeds."""
        while True:
            with self._changed:
                if not self._queue or self._ends:
                    self._thread = None
                    return
                job = self._queue[0]
            try:
                self._take_back(job) if isinstance(job, int) else self._put(job)
            except Exception as error:  # noqa: BLE001 - the packages behind fsspec raise anything, and a dead thread uploads nothing
                self._failed(error)
                continue
            with self._changed:
                self._queue.popleft()
                self._succeeded()
                self._changed.notify_all()

    def _put(self, waiting: _Waiting) -> None:
        try:
            source = waiting.file.open("rb")
        except FileNotFoundError:
            with self._changed:
                self._news.append(f"Another program deleted `{waiting.file}` before its upload. Its rows are lost.")
        else:
            with source:
                _upload(source, self._where, waiting.file.relative_to(self._own), self._made)
            waiting.file.unlink(missing_ok=True)
        with self._changed:
            self._used -= waiting.size

    def _take_back(self, step: int) -> None:
        for folder in sorted(self._spool.glob(f"rank-{self._rank:04d}.*")):
            with _held(folder) as is_free:
                if is_free:
                    remove_from(folder, step, self._rank)
                    _, damaged = _upload_left(folder, self._where, self._made)
                    with self._changed:
                        self._news += damaged
        remove_from(self._where, step, self._rank)
        (self._own / _TAKE_BACK).unlink(missing_ok=True)

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
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(self._num_failed - 1, 30))
            self._changed.wait(wait * random.uniform(0.5, 1.0))  # ranks must not return all at once

    def _succeeded(self) -> None:
        if self._num_failed >= OUTAGE:
            self._news.append(
                f"`{self._where}` takes records again after {time.monotonic() - self._failing_since:,.0f} s. "
                f"{len(self._queue) + 1:,} files waited and none of them was lost."
            )
        self._num_failed = 0


def _upload(source: IO[bytes], where: Remote, name: Path, made: set[str]) -> None:
    """Writes a file of a record to the store. `made` has the folders that exist there."""
    for part in name.parts[:-1]:
        where = where / part
    if where.path not in made:
        storage.make_folder(where)
        made.add(where.path)
    storage.send(source, where / name.name)


def _upload_left(folder: Path, where: Remote, made: set[str]) -> tuple[int, list[str]]:
    """Uploads the complete files that an ended process left, oldest first.

    Returns:
        The number of files, and a message for each damaged one, which stays.
    """
    uploaded, messages = 0, []
    rank = int(folder.name[len("rank-") :].partition(".")[0])
    with suppress(FileNotFoundError):
        remove_from(where, int((folder / _TAKE_BACK).read_text()), rank)
        (folder / _TAKE_BACK).unlink()
    files = [file for kind in ("parquet", "json") for file in folder.rglob(f"[!.]*.{kind}") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file)):
        try:
            with storage.open_regular(file) as source:
                if file.suffix == ".json":
                    checked_json(source.read())
                elif not checked_file(source)[2]:
                    raise ValueError("no checksums")
        except (OSError, ValueError) as error:
            messages.append(f"`{file}` is not uploaded: {str(error).rstrip('.')}. Delete it if nobody needs it.")
            continue
        with storage.open_regular(file) as source:
            _upload(source, where, file.relative_to(folder), made)
        file.unlink()
        uploaded += 1
    _remove_empty(folder)
    return uploaded, messages


def upload_left(
    address: str | os.PathLike[str] | Remote, spool: str | os.PathLike[str] | None = None
) -> tuple[int, list[str]]:
    """Uploads what ended processes of all ranks left in the spool of a record.

    Args:
        address: The address of the record, in an object store.
        spool: The folder that holds all spools, if it is not the usual one.

    Returns:
        The number of files, and a message for each file or process whose files stay.

    Raises:
        ConfigError: If the address is a local path.
        RecordError: If the store fails.
    """
    where = storage.place(address)
    if not isinstance(where, Remote):
        raise ConfigError(f"ADDRESS must be in an object store, got the local path `{where}`. Its files do not wait.")
    num, messages, made = 0, list[str](), set[str]()
    for folder in sorted(spool_of(where, spool).glob("rank-*.*")):
        with _held(folder) as is_free:
            if not is_free and _waits(folder):
                messages.append(f"`{folder}` belongs to a process that runs. It uploads its files itself.")
            if not is_free:
                continue
            try:
                uploaded, damaged = _upload_left(folder, impatient(where), made)
            except OSError as error:
                raise RecordError(f"Cannot upload `{folder}` to `{where}`: {str(error).rstrip('.')}.") from error
            num += uploaded
            messages += damaged
    return num, messages


def _locked(folder: Path) -> IO[str] | None:
    """Locks the folder of a recorder. Returns None if another process holds it, or the platform has no locks."""
    if fcntl is None:
        return None
    lock = (folder / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Context manager that yields True while it holds the folder of an ended process."""
    try:
        lock = _locked(folder)
    except OSError:  # its process has just removed it
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _waits(folder: Path) -> bool:
    """Returns True if files wait in the folder of a recorder."""
    return any(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def _remove_empty(folder: Path) -> None:
    """Deletes the folder of a recorder with what it needs no longer, if no file waits in it."""
    if _waits(folder):
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with suppress(OSError):
        folder.rmdir()


_OPEN: "WeakSet[Uploads]" = WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends the uploads of this process. Registered after pyarrow's own exit, which waits for running requests."""
    last = time.monotonic() + FLUSH_SECONDS
    for uploads in list(_OPEN):
        uploads.end(max(0.0, last - time.monotonic()))
