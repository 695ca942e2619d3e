"""Files from outside, read with bounds, and files written atomically.

Reading takes regular files only, with no links out of a folder, and limits sizes, digits, depth, and the memory
that the values take. A file that breaks a bound raises an `OSError` or a `ValueError` whose message says why. No torch.
"""

import errno
import hashlib
import json
import math
import os
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trustrl import limits

LARGEST = 1_000_000_000
"""Bytes of the largest file that is read at once."""

LARGEST_LOG = 16_000_000_000
"""Bytes of the largest file that is read piece by piece."""

LARGEST_LINE = 64_000_000
LARGEST_TOML = 1_000_000
"""Bytes of the largest line and of the largest TOML file. The largest recipe has about 2,000 bytes."""

LARGEST_HEADER = 100_000_000
"""Bytes of the largest header of a safetensors file, as its format limits them."""

DEEPEST = 64
"""Levels of nesting in JSON and TOML."""

MOST_DIGITS = 20
"""Digits of an integer. A longer one in JSON is read as a floating-point number; in TOML it is refused."""

_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(file: Path, largest: int = LARGEST_LOG) -> IO[bytes]:
    """Opens a file for reading. Does not wait for a FIFO, and does not open devices.

    Raises:
        OSError: If the file cannot be opened, is not a regular file, or is larger than `largest` bytes.
    """
    handle = os.open(file, os.O_RDONLY | _WITHOUT_WAITING)
    about = os.fstat(handle)
    if stat.S_ISREG(about.st_mode) and about.st_size <= largest:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(file))
    if stat.S_ISREG(about.st_mode):
        raise OSError(errno.EFBIG, f"Larger than {largest:,} bytes", str(file))
    raise OSError(errno.EINVAL, "Not a regular file", str(file))


def read_regular(file: Path, largest: int = LARGEST) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or is larger than `largest` bytes.
    """
    with open_regular(file, largest) as opened:
        content = opened.read(largest + 1)
    if len(content) > largest:  # it has grown since
        raise OSError(errno.EFBIG, f"Larger than {largest:,} bytes", str(file))
    return content


def safetensors_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Returns the bytes before the tensors of a safetensors file of any size, and the tensors' entries by name.

    Raises:
        OSError: If the file cannot be read, or is not a regular file.
        ValueError: If its header is damaged.
    """
    with open_regular(file, largest=sys.maxsize) as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = parsed_json(opened.read(min(length, LARGEST_HEADER)))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def lines_of(opened: IO[bytes], largest: int = LARGEST_LINE) -> Iterator[bytes]:
    """Yields the lines of an open file.

    Raises:
        OSError: If a line is larger than `largest` bytes.
    """
    while line := opened.readline(largest + 1):
        if len(line) > largest:
            raise OSError(errno.EFBIG, f"A line is larger than {largest:,} bytes")
        yield line


def last_lines(file: Path, number: int) -> list[str]:
    """Returns the last lines of a log of any size, as far as they are in its last 64,000 bytes."""
    with open_regular(file, largest=sys.maxsize) as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - 64_000))
        return opened.read().decode("utf-8", errors="replace").splitlines()[-number:]


def leads_out(file: Path, folder: Path) -> bool:
    """Returns True if the file is a link, or lies behind one, that leads out of the folder."""
    return not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def shortened(value: object, longest: int = 200) -> str:
    """Returns a value from a file for a message, cut to its first `longest` characters.

    Example:
        >>> shortened("version " + 500 * "9", longest=12)
        'version 9999… (508 characters)'
    """
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def parsed_json(text: bytes | str) -> Any:
    """Returns the value of JSON text in UTF-8.

    Raises:
        OverLimit: If its values could take more memory than allowed.
        ValueError: If the text is not JSON, or nested too deeply.

    Example:
        >>> parsed_json('{"a": 12, "b": 123456789012345678901}')
        {'a': 12, 'b': 1.2345678901234568e+20}
    """
    limits.check(_decoded_size(text), limits.DECODED, "its values")
    try:
        return bounded(json.loads(text, parse_int=_integer))
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None


_COSTS = ((b"{", 200), (b"[", 90), (b",", 70), (b":", 100))
"""Bytes that CPython takes for an object, an array, a value and an entry of an object, at most."""


def _decoded_size(text: bytes | str) -> int:
    """Returns a bound on the memory that JSON text takes while it is decoded, from its signs.

    Signs inside strings count too. A character of text takes up to 4 bytes, in a copy and in a value.
    """
    size = len(text) * (2 if text.isascii() else 8)
    if len(text) < 1_000_000:  # the counts could not reach the limit
        return size
    return size + sum(text.count(sign if isinstance(text, bytes) else sign.decode()) * cost for sign, cost in _COSTS)  # pyright: ignore[reportArgumentType]


def why_not_json(error: ValueError) -> str:
    """Returns the reason that `parsed_json` refused a text, as a phrase.

    Example:
        >>> try:
        ...     parsed_json("{")
        ... except ValueError as error:
        ...     why_not_json(error)
        'not valid JSON'
    """
    return "not valid JSON" if isinstance(error, (json.JSONDecodeError, UnicodeError)) else str(error)


def parsed_toml(text: bytes) -> dict[str, Any]:
    """Returns the table of TOML text.

    Raises:
        ValueError: If the text is not TOML in UTF-8, too long, or nested too deeply, or an integer is too large.
    """
    if len(text) > LARGEST_TOML:
        raise ValueError(f"larger than {LARGEST_TOML:,} bytes")
    try:
        return bounded(tomllib.loads(text.decode("utf-8").replace("\r\n", "\n")))
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None


def bounded(value: Any) -> Any:
    """Returns the value if its nesting and its integers are within the bounds.

    Raises:
        ValueError: If they are not. A value that is used in several places counts in each of them.
    """
    level, left = [value], 10_000_000
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, int) and abs(item) >= 10**MOST_DIGITS:
                raise ValueError(f"an integer has more than {MOST_DIGITS} digits")
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, (list, tuple)):
                inner += item
            if len(inner) > left:
                raise ValueError("more than 10,000,000 values")
        left -= len(inner)
        if not inner:
            return value
        level = inner
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, with None."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(file: Path, data: Any, *, synced: bool = False) -> None:
    """Writes a JSON file atomically."""
    write_whole(file, json.dumps(data, indent=1) + "\n", synced=synced)


def write_whole(file: Path, text: str, *, synced: bool = False) -> None:
    """Writes a file atomically.

    Args:
        file: The file to create or replace.
        text: Its content.
        synced: Waits until content and name have reached the disk. Without it, a power failure may leave an empty file.
    """
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as opened:
            opened.write(text)
            if synced:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)  # exists only after a failure
    if synced:
        sync(file.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, have reached the disk."""
    if os.name != "posix":
        return  # other systems can only sync a file that is open for writing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hashed(file: Path) -> dict[str, Any]:
    """Returns the bytes and the SHA-256 of a regular file. Does not follow a link.

    Raises:
        OSError: If the file cannot be read, or is not a regular file.
    """
    with open(file, "rb", opener=regular_alone) as opened:
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def regular_alone(path: str, flags: int) -> int:
    """Opens a regular file. Neither follows a link nor waits for a FIFO."""
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle
