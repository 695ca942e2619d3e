"""SQLite databases of trackers, opened for reading only.

A database is a program as well: views, generated columns and virtual tables compute rows without end from a few bytes.
Queries therefore read the columns of stored tables alone, call no function, and may take a number of steps in
proportion to the file.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.files import LARGEST, open_regular
from trustrl.limits import OverLimit, advice, check, factor

DAMAGE = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)
"""Errors that SQLite raises for a damaged file."""

LARGEST_VALUE = 16_000_000
"""Bytes of the largest text or blob."""

STEPS, STEPS_PER_BYTE = 10_000_000, 4
"""Steps of SQLite's virtual machine that reading a database may take, and further ones for each byte of the file. A row
takes about ten, and at least as many bytes."""

VALUES, PER_BYTE = 100_000_000, 8
"""Bytes that the values of a query may have, and further ones for each byte of the file."""

_HEADER = b"SQLite format 3\0"
_EVERY = 10_000


class Database:
    """Database that answers queries about its stored tables."""

    def __init__(self, file: Path, connection: sqlite3.Connection) -> None:
        with open_regular(file, LARGEST) as opened_file:
            self._size = opened_file.seek(0, 2)
        self._connection = connection
        self._steps = 0
        self._most = int((STEPS + STEPS_PER_BYTE * self._size) * factor())
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        connection.set_progress_handler(self._count, _EVERY)
        connection.execute("pragma trusted_schema = off")
        listed = connection.execute("select name, type = 'table' and rootpage > 0 from sqlite_master").fetchall()
        self.names = {name for name, _ in listed}
        """Names of everything that a query could ask for. A reader is chosen by them."""

        self.tables = {name for name, is_stored in listed if is_stored}
        """Names of the tables whose rows are stored in the file."""

        connection.set_authorizer(self._allows)

    def rows(self, table: str, columns: Sequence[str], where: str = "", values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yields columns of a stored table.

        Args:
            table: The table.
            columns: Its columns.
            where: Condition and order, in SQL.
            values: Values of the question marks in the condition.

        Raises:
            RecordError: If the table or a column is computed instead of stored.
            OverLimit: If the rows take more steps, or have more bytes, than the size of the file explains.
            sqlite3.Error: If the file is damaged.
        """
        self._check_stored(table, columns)
        num_bytes = 0
        try:
            for row in self._connection.execute(f"select {', '.join(columns)} from {table} {where}", values):
                num_bytes += sum(len(value) for value in row if isinstance(value, (str, bytes)))
                check(num_bytes, VALUES + PER_BYTE * self._size, f"the values of {table}", "bytes")
                yield row
        except sqlite3.OperationalError:
            if self._steps > self._most:
                raise OverLimit(
                    f"reading {table} takes more than {self._most:,} steps, too many for a file of {self._size:,} "
                    f"bytes. {advice(2 * factor())}"
                ) from None
            raise

    def _check_stored(self, table: str, columns: Sequence[str]) -> None:
        if table not in self.tables:
            raise RecordError(f"{table} must be a table, got a view, a virtual table or nothing")
        self._connection.set_authorizer(None)
        hidden = {name: kind for _, name, *_, kind in self._connection.execute(f"pragma table_xinfo({table})")}
        self._connection.set_authorizer(self._allows)
        for name in columns:
            if hidden.get(name, 0):
                raise RecordError(f"{table}.{name} must be stored, got a column that the database computes")

    def _allows(self, action: int, table: str | None, _column: str | None, _base: str | None, inner: str | None) -> int:
        """Allows to read stored tables, and nothing else. `inner` names the view or trigger that asks."""
        is_read = action == sqlite3.SQLITE_READ and table in self.tables and inner is None
        return sqlite3.SQLITE_OK if is_read or action == sqlite3.SQLITE_SELECT else sqlite3.SQLITE_DENY

    def _count(self) -> int:
        self._steps += _EVERY
        return int(self._steps > self._most)


@contextmanager
def opened(file: Path) -> Iterator[Database]:
    """Opens a database without writing next to it, unless a process that writes to it has left a log there."""
    file = file.resolve()
    mode = "mode=ro" if file.with_name(f"{file.name}-wal").is_file() else "immutable=1"
    with closing(sqlite3.connect(f"{file.as_uri()}?{mode}", uri=True)) as connection:
        yield Database(file, connection)


def tables(file: Path) -> set[str]:
    """Returns the names of a database's tables and views, or nothing if the file is not a readable database."""
    try:
        with open_regular(file, LARGEST) as start:
            if start.read(16) != _HEADER:
                return set()
        with opened(file) as database:
            return database.names
    except (OSError, *DAMAGE):
        return set()
