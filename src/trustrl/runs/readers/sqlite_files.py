"""SQLite databases of trackers, opened for reading only."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from trustrl.files import open_regular

DAMAGE = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors that SQLite raises for a damaged file."""

_HEADER = b"SQLite format 3\0"


@contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Opens a database without writing next to it, unless a process that writes to it has left a log there."""
    file = file.resolve()
    mode = "mode=ro" if file.with_name(f"{file.name}-wal").is_file() else "immutable=1"
    with closing(sqlite3.connect(f"{file.as_uri()}?{mode}", uri=True)) as connection:
        yield connection


def tables(file: Path) -> set[str]:
    """Returns the names of a database's tables, or nothing if the file is not a readable database."""
    try:
        with open_regular(file) as start:
            if start.read(16) != _HEADER:
                return set()
        with opened(file) as connection:
            return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except (OSError, *DAMAGE):
        return set()
