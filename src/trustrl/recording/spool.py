"""Spool: local folders in which files of a record wait for an object store, and those of ended processes. No torch.

SPOOL/NAME-HASH/rank-0000.TIME-PID/     one recorder. It holds a lock on `.lock` until it ends
    step-00000012.rank-0000.parquet     files that wait, laid out as in the record
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import IO
from urllib.parse import parse_qs

from trustrl.errors import ConfigError, RecordError
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import checked_file, checked_json
from trustrl.recording.storage import Remote

try:
    import fcntl
except ImportError:  # Windows has no such locks, so what an ended process left stays there
    fcntl = None

_LOCK = ".lock"


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
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != _user():
            raise ConfigError(f"`{root}` must be a folder of yours, got another user's. Set recording.spool.")
    spool = root / f"{where.name}-{name}"
    spool.mkdir(exist_ok=True)
    return spool


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def impatient(where: Remote) -> Remote:
    """Returns the place through a client that raises after one attempt, for callers that retry themselves.

    pyarrow's client for S3 gives up on a hanging server after 10 s for each of three attempts, and holds back the end
    of the process until then.
    """
    if where.filesystem.type_name != "s3":
        return where
    fs = need("pyarrow.fs", extra="records")
    try:
        _, (settings,) = where.filesystem.__reduce__()
        once = fs.S3FileSystem(**settings, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1))
    except (TypeError, ValueError):  # another release of pyarrow, whose client only takes longer
        return where
    return Remote(where.address, once, where.path)


def upload(source: IO[bytes], where: Remote, name: Path, made: set[str]) -> None:
    """Writes a file of a record to the store. `made` has the folders that exist there."""
    for part in name.parts[:-1]:
        where = where / part
    if where.path not in made:
        storage.make_folder(where)
        made.add(where.path)
    storage.send(source, where / name.name)


def upload_folder(folder: Path, where: Remote, made: set[str]) -> tuple[int, list[str]]:
    """Uploads the complete files that an ended process left, oldest first.

    Returns:
        The number of files, and a message for each damaged one, which stays.
    """
    uploaded, messages = 0, []
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
            upload(source, where, file.relative_to(folder), made)
        file.unlink()
        uploaded += 1
    remove_empty(folder)
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
        with held(folder) as is_free:
            if not is_free and waits(folder):
                messages.append(f"`{folder}` belongs to a process that runs. It uploads its files itself.")
            if not is_free:
                continue
            try:
                uploaded, damaged = upload_folder(folder, impatient(where), made)
            except OSError as error:
                raise RecordError(f"Cannot upload `{folder}` to `{where}`: {str(error).rstrip('.')}.") from error
            num += uploaded
            messages += damaged
    return num, messages


def new_folder(spool: Path, rank: int) -> tuple[Path, IO[str] | None]:
    """Creates the folder of a recorder. Returns it with its lock."""
    name = f"rank-{rank:04d}.{time.time_ns():020d}-{os.getpid()}"
    hidden = spool / f".{name}"
    hidden.mkdir(mode=0o700)
    lock = locked(hidden)  # before others see the folder
    return hidden.rename(spool / name), lock


def locked(folder: Path) -> IO[str] | None:
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
def held(folder: Path) -> Iterator[bool]:
    """Context manager that yields True while it holds the folder of an ended process."""
    try:
        lock = locked(folder)
    except OSError:  # its process has just removed it
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def waits(folder: Path) -> bool:
    """Returns True if files wait in the folder of a recorder."""
    return any(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def remove_empty(folder: Path) -> None:
    """Deletes the folder of a recorder with what it needs no longer, if no file waits in it."""
    if waits(folder):
        return
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with suppress(OSError):
        folder.rmdir()
