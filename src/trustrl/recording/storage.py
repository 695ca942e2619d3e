"""Files of a record by address: local paths, and object stores that pyarrow or fsspec know. No torch.

A place is a `Path` on this machine or a `Remote` anywhere else. pyarrow reads s3, gs, abfs and hdfs itself; fsspec
adds the schemes of the packages that are installed, such as hf, memory and sftp.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable
from urllib.parse import urlsplit
from urllib.request import url2pathname

from trustrl.errors import ConfigError, MissingPackageError, RecordError
from trustrl.files import leads_out, open_regular, read_regular, sync
from trustrl.optional_imports import need
from trustrl.recording import checksums

IN_MEMORY = 16 * 2**20
"""Bytes of an unfinished remote file that memory holds. A larger one continues in a temporary file."""

LARGEST_TEXT = 16 * 2**20
"""Bytes of the largest JSON file of a record."""

_WITHOUT_FOLDERS = ("s3", "gcs", "abfs")
"""Filesystems of pyarrow in which a name may contain a slash without a folder. They need no request to create one."""


@runtime_checkable
class Spool(Protocol):
    """Local folder in which files for a store wait for their upload; see `trustrl.recording.spool`."""

    def local(self, where: "Remote") -> Path:
        """Returns the path at which a file or folder waits."""
        ...

    def submit(self, file: Path) -> None:
        """Takes a complete file to upload it later. Does not wait."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Remote:
    """File or folder outside this machine. `str` and `repr` leave out passwords and the query, which may hold keys."""

    address: str
    """Complete address, as `place` reads it."""

    filesystem: Any = field(compare=False)
    """The `pyarrow.fs.FileSystem`."""

    path: str = field(compare=False)
    """Name in the filesystem."""

    spool: Spool | None = field(default=None, compare=False)
    """Folder in which files written here wait for their upload. None uploads them at once."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> "Remote":
        if not name:  # as with a Path: files of tokens are in the record itself
            return self
        before, mark, query = self.address.partition("?")
        path = f"{self.path.rstrip('/')}/{name}" if self.path else name
        address = f"{before.rstrip('/') if self.path else before}/{name}{mark}{query}"
        return Remote(address, self.filesystem, path, self.spool)

    def __str__(self) -> str:
        return _shown(self.address)

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"


Place: TypeAlias = Path | Remote
SamePlace = TypeVar("SamePlace", bound=Place)
"""Local for a local folder, remote for a remote one."""


def place(address: "str | os.PathLike[str] | Remote") -> Place:
    """Returns the place that an address names. Makes no request, except where pyarrow looks up a bucket's region.

    Args:
        address: A local path, or an address such as `s3://bucket/run/records`, `gs://...`, `abfs://...`, `hf://...`
            or `file:///...`. A query passes settings to pyarrow: `s3://bucket/x?endpoint_override=host:9000`.

    Raises:
        ConfigError: If neither pyarrow nor fsspec knows the scheme, or the address is malformed.
        MissingPackageError: If the package that reads the address is not installed.
    """
    if isinstance(address, Remote):
        return address
    if not isinstance(address, str) or "://" not in address:
        cut = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)", os.fspath(address))
        if cut and cut[1] != "file":
            raise ConfigError(
                f"An address must contain two slashes after the scheme, got `{address}`. Pass it as a string: pathlib "
                "removes one."
            )
        return Path(address)
    if address.startswith("file://"):
        return Path(url2pathname(urlsplit(address).path))
    before, mark, query = address.partition("?")
    scheme, _, rest = before.rstrip("/").partition("://")
    folder, slash, name = rest.rpartition("/")
    # Files of one folder share a connection.
    root = Remote(*_resolved(f"{scheme}://{folder if slash else name}{mark}{query}"))
    return root / name if slash else root


@lru_cache(maxsize=64)
def _resolved(address: str) -> tuple[str, Any, str]:
    pa, fs = need("pyarrow", extra="records"), need("pyarrow.fs", extra="records")
    asked, refused = [address], None
    if address.startswith("s3://") and "allow_delayed_open=" not in address:
        # One request for a small file instead of three. Older releases of pyarrow refuse the setting.
        asked.insert(0, f"{address}{'&' if '?' in address else '?'}allow_delayed_open=true")
    for uri in asked:
        try:
            return address, *fs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            refused = error  # not a scheme of this build of pyarrow, or malformed
        except ImportError as error:
            raise _missing(address, error) from error
    try:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(address)
    except ImportError as error:
        raise _missing(address, error) from error
    except ValueError as error:
        raise ConfigError(
            f"An address must be a local path or have a scheme that pyarrow or fsspec knows, got `{_shown(address)}`. "
            f"pyarrow: {refused}. fsspec: {error}."
        ) from error
    return address, fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path


def _missing(address: str, error: ImportError) -> MissingPackageError:
    return MissingPackageError(f"`{_shown(address)}` needs a package that is not installed: {error}.")


def _shown(address: str) -> str:
    scheme, _, rest = address.partition("?")[0].partition("://")
    before, separator, after = rest.partition("@")
    return f"{scheme}://{after}" if separator and ":" in before else f"{scheme}://{rest}"


def address_of(where: Place) -> str:
    """Returns the address as `place` reads it, with everything that another process needs."""
    return str(where) if isinstance(where, Path) else where.address


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raises every error of a store as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each package behind fsspec raises other ones
        raise OSError(f"{type(error).__name__}: {error}") from error


def entries(folder: SamePlace, pattern: str) -> list[SamePlace]:
    """Returns the files and folders directly in a folder whose names match, sorted by name. One request if remote.

    Returns an empty list if the folder does not exist.

    Raises:
        RecordError: If an entry is a link that leads out of the folder.
    """
    return cast("list[SamePlace]", _local(folder, pattern) if isinstance(folder, Path) else _remote(folder, pattern))


def _local(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as listed:
        matches = sorted((entry.name, entry.is_symlink()) for entry in listed if fnmatchcase(entry.name, pattern))
    return [inside(folder, name) if is_link else folder / name for name, is_link in matches]


def inside(folder: SamePlace, name: str) -> SamePlace:
    """Returns the place of an entry of a folder.

    Raises:
        RecordError: If the entry is a link that leads out of the folder.
    """
    entry = folder / name
    if isinstance(entry, Path) and isinstance(folder, Path) and entry.is_symlink() and leads_out(entry, folder):
        raise RecordError(
            f"`{entry}` must be in the folder itself, got a link to `{entry.readlink()}`. Pass its target."
        )
    return cast("SamePlace", entry)


def _remote(folder: Remote, pattern: str) -> list[Remote]:
    fs = need("pyarrow.fs", extra="records")
    with _os_errors():
        if "fsspec" in folder.filesystem.type_name:
            folder.filesystem.handler.fs.invalidate_cache()  # other processes write too
        infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    names = {info.path.rstrip("/").rpartition("/")[2] for info in infos}
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def is_folder(where: Place) -> bool:
    """Returns True if this is a folder, or the start of a name in an object store."""
    return where.is_dir() if isinstance(where, Path) else _kind(where) == "Directory"


def is_file(where: Place) -> bool:
    """Returns True if this is a file."""
    return where.is_file() if isinstance(where, Path) else _kind(where) == "File"


def _kind(where: Remote) -> str:
    with _os_errors():
        return where.filesystem.get_file_info(where.path).type.name


@contextmanager
def readable(where: Place) -> Iterator[Any]:
    """Context manager that yields a file that is open for reading."""
    if isinstance(where, Path):
        with open_regular(where) as file:
            yield file
        return
    with _os_errors():
        file = where.filesystem.open_input_file(where.path)
    with file:
        yield file


def read_bytes(where: Place) -> bytes:
    """Returns the content of a small file.

    Raises:
        OSError: If it cannot be read, is not a regular file, or is larger than `LARGEST_TEXT`.
    """
    if isinstance(where, Path):
        return read_regular(where, LARGEST_TEXT)
    with _os_errors(), where.filesystem.open_input_file(where.path) as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise OSError(f"larger than {LARGEST_TEXT:,} bytes")
    return content


def write_text(where: Place, text: str, *, synced: bool = False) -> None:
    """Writes a small file atomically. `synced` waits until content and name are on the disk, if it is a local file."""
    whole = WholeFile(where)
    try:
        with whole.opened() as file:
            file.write(text.encode())
        if synced and isinstance(whole.target, Path):
            sync(whole.target)
        whole.publish()
        if synced and isinstance(where, Path):
            sync(where.parent)
    except OSError:
        whole.abandon()
        raise


def make_folder(folder: Place) -> None:
    """Creates a folder and its parents if they are missing. Makes no request in object stores, which have none."""
    if isinstance(folder, Remote) and folder.spool is not None:
        folder = folder.spool.local(folder)
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    elif folder.filesystem.type_name not in _WITHOUT_FOLDERS:
        with _os_errors():
            folder.filesystem.create_dir(folder.path, recursive=True)


def remove(where: Place) -> None:
    """Deletes a file. Does nothing if another process has deleted it."""
    if isinstance(where, Path):
        where.unlink(missing_ok=True)
        return
    with _os_errors(), suppress(FileNotFoundError):
        where.filesystem.delete_file(where.path)


def move(where: Place, folder: Place, name: str) -> None:
    """Moves a file into another folder of the same store. Does nothing if another process has moved it."""
    with suppress(FileNotFoundError):
        if isinstance(where, Path):
            os.replace(where, folder / name)  # pyright: ignore[reportArgumentType]: both are local
            return
        with _os_errors():
            where.filesystem.move(where.path, cast("Remote", folder / name).path)


def size_of(where: Place) -> int:
    """Returns the bytes of a file."""
    if isinstance(where, Path):
        return where.stat().st_size
    with _os_errors():
        return where.filesystem.get_file_info(where.path).size or 0


def remove_empty(folder: Place) -> None:
    """Deletes a local folder if it is empty. An object store has no empty folders."""
    if isinstance(folder, Path):
        with suppress(OSError):  # it has files, or another process has just removed it
            folder.rmdir()


def send(source: IO[bytes], where: Remote) -> None:
    """Writes a file of a store. Does not delete what a broken connection may leave of it.

    Raises:
        OSError: If the store refuses.
    """
    source.seek(0)
    with _os_errors(), where.filesystem.open_output_stream(where.path) as sink:
        copyfileobj(source, sink, IN_MEMORY)


class WholeFile:
    """File that appears under its name only when it is complete.

    On this machine it is written under a temporary name and renamed. For a store with a spool the same happens in the
    spool. For a store without one it is collected in memory and then in a temporary file, and uploaded at once: a
    stream that breaks off could leave part of a file there.
    """

    def __init__(self, where: Place) -> None:
        self._where = where
        self._spool = where.spool if isinstance(where, Remote) else None
        self.target: Path | IO[bytes]
        """Path or file to write to, as `pyarrow.parquet.ParquetWriter` takes it."""

        if isinstance(where, Path):
            self._local: Path | None = where
        else:
            self._local = None if where.spool is None else where.spool.local(where)
        if self._local is not None:
            self.target = self._local.with_name(f".{self._local.name}.tmp")
        else:
            self.target = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Context manager that yields the target as an open file."""
        if isinstance(self.target, Path):
            with self.target.open("wb") as file:
                yield file
        else:
            yield self.target

    def seal(self) -> None:
        """Adds checksums to a complete Parquet file."""
        if isinstance(self.target, Path):
            with self.target.open("r+b") as file:
                checksums.seal(file)
        else:
            checksums.seal(self.target)

    def publish(self) -> None:
        """Gives the complete file its name.

        Raises:
            OSError: If the disk or the store refuses. Call `abandon` then.
        """
        if isinstance(self.target, Path):
            assert self._local is not None
            os.replace(self.target, self._local)
            if self._spool is not None:
                self._spool.submit(self._local)
            return
        assert isinstance(self._where, Remote)
        try:
            send(self.target, self._where)
        except OSError:
            with suppress(OSError):  # closing a stream may have published a part
                remove(self._where)
            raise
        self.target.close()

    def abandon(self) -> None:
        """Deletes the unfinished file."""
        if isinstance(self.target, Path):
            self.target.unlink(missing_ok=True)
        else:
            self.target.close()
