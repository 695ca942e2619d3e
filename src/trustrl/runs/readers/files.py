"""Files of a folder, listed once for all readers, and text files that may be damaged."""

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import leads_out, lines_of, open_regular, parsed_json, read_regular, why_not_json
from trustrl.limits import OverLimit, advice
from trustrl.recording.part_names import PartName

DEEPEST = 5
"""Levels of folders that are searched."""

MOST_FILES = 50_000
WANDB_LOG = "debug-core.log"
"""W&B links this log of its own process into each run. It has no metrics."""

MOST_DAMAGE = 1_000
"""Damaged lines of a file after which the rest of it is left out."""

LOG_END = 1_000_000
"""Bytes at the end of a log that are searched for its last lines."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files below one folder, by their relative paths."""

    root: Path
    names: tuple[str, ...]
    run: str | None = None
    """Name of the run to read, if a file has several: the text after `::` in the path."""

    faults: tuple[str, ...] = ()
    """Entries that are not listed because they are not regular files, or lead out of the folder."""

    def matching(self, *patterns: str) -> list[Path]:
        """Returns the files whose relative path matches a pattern. `*` does not match a slash.

        Example:
            >>> files = Files(Path("run"), ("a.log", "checkpoint-2/trainer_state.json"))
            >>> [path.name for path in files.matching("*.log", "checkpoint-*/trainer_state.json")]
            ['a.log', 'trainer_state.json']
        """
        return [self.root / name for name in self.names if any(_matches(name, pattern) for pattern in patterns)]

    def short(self, file: Path) -> str:
        """Returns a file's path relative to the folder."""
        return os.path.relpath(file, self.root)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def files_of(path: Path, run: str | None = None) -> Files:
    """Lists the regular files of a folder, or one file. Does not follow links to folders, or out of the folder."""
    if path.is_file():
        return Files(path.parent, (path.name,), run)
    names: list[str] = []
    faults: list[str] = []
    for folder, folders, files in os.walk(path):
        relative = os.path.relpath(folder, path)
        depth = 0 if relative == "." else relative.count(os.sep) + 1
        folders[:] = sorted(folders) if depth < DEEPEST else []
        if (parts := [name for name in files if PartName.of(name)]) and depth:
            continue  # `trustrl.recording` reads token records, however many files they have
        files = sorted({*files} - {*parts[1:]})  # one tells that the folder is a record
        for name in files:
            short = name if depth == 0 else f"{relative}/{name}".replace(os.sep, "/")
            if (why := _unfit(Path(folder, name), path)) is None:
                names.append(short)
            elif name != WANDB_LOG:
                faults.append(f"{short}: {why}; left out")
        if len(names) > MOST_FILES:
            raise ConfigError(
                f"RUN must be the folder of one run, got {path}, which has more than {MOST_FILES:,} files. Pass a "
                "folder inside it."
            )
    return Files(path, tuple(names), run, tuple(faults))


def _unfit(file: Path, root: Path) -> str | None:
    """Returns the reason not to read an entry of a folder, or None."""
    try:
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            if leads_out(file, root):
                return "a link that leads out of the folder"
            mode = file.stat().st_mode
    except OSError as error:
        return str(error.strerror)
    return None if stat.S_ISREG(mode) else "not a regular file"


def chosen_name(files: Files, names: Sequence[str], several: str) -> str | None:
    """Returns the run to read: the named one, or the only one. None if there is none."""
    if files.run is not None and names:
        if files.run not in names:
            raise ConfigError(f"The run after :: must be one of {', '.join(names[:20])}, got {files.run}.")
        return files.run
    if len(names) > 1:
        raise ConfigError(f"RUN must be one run, but {several}. Append :: and one of: {', '.join(names[:20])}.")
    return names[0] if names else None


def chosen_file(files: Files, paths: Sequence[Path], what: str) -> Path | None:
    """Returns the only file, or None."""
    if len(paths) > 1:
        names = ", ".join(map(files.short, paths[:5]))
        raise ConfigError(f"RUN must be one run, got {files.root}, which has {len(paths)} {what}. Pass one: {names}.")
    return paths[0] if paths else None


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its type."""
    if isinstance(error, MemoryError):  # the command reached its limit: trustrl.cli.limited_process
        return f"it takes more memory than allowed. {advice(2)}"
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of a file that could not be read."""

    text: str


def json_lines(file: Path, short: str) -> Iterator[tuple[int, Any] | Fault]:
    """Yields the number and value of each line of JSON, or a fault for a line that is damaged or truncated."""
    damaged = 0
    try:
        with open_regular(file) as opened:
            for line_number, line in enumerate(lines_of(opened), 1):
                if not line.strip():
                    continue
                try:
                    yield line_number, parsed_json(line)
                except ValueError as error:
                    is_torn = not line.endswith(b"\n") and not isinstance(error, OverLimit)
                    why = "the last line is truncated" if is_torn else why_not_json(error)
                    yield Fault(f"{short}, line {line_number}: {why}; left out")
                    damaged += 1
                    if damaged == MOST_DAMAGE:
                        yield Fault(f"{short}: {damaged:,} lines are damaged; the rest is left out")
                        return
    except OSError as error:
        yield Fault(f"{short}: {error.strerror}; left out")


def json_object(file: Path, short: str) -> dict[str, Any] | Fault:
    """Returns the object in a JSON file, or a fault."""
    try:
        content = parsed_json(read_regular(file))
    except OSError as error:
        return Fault(f"{short}: {error.strerror}; left out")
    except ValueError as error:
        return Fault(f"{short}: {why_not_json(error)}; left out")
    return content if isinstance(content, dict) else Fault(f"{short}: not a JSON object; left out")


def opening(file: Path, size: int = 65536) -> bytes:
    """Returns the first bytes of a file, or nothing if it cannot be read."""
    try:
        with open_regular(file) as opened:
            return opened.read(size)
    except OSError:
        return b""


def last_lines(file: Path, num: int) -> list[str]:
    """Returns the last lines of a log, or nothing if it cannot be read."""
    try:
        with open_regular(file) as opened:
            opened.seek(max(0, opened.seek(0, 2) - LOG_END))
            return opened.read(LOG_END).decode("utf-8", errors="replace").splitlines()[-num:]
    except OSError:
        return []


def stamped(name: str) -> int:
    """Returns the last number in a file name, or -1.

    Example:
        >>> stamped("checkpoint-120"), stamped("completions_00002.parquet"), stamped("a")
        (120, 2, -1)
    """
    digits = "".join(sign if sign.isdigit() and sign.isascii() else " " for sign in name).split()
    return int(digits[-1]) if digits and len(digits[-1]) < 16 else -1
