"""Disk states that a power failure may leave, replayed from the recorded writes of a run.

`recorded` notes every call of Python that syncs, renames, removes or creates something below a folder. Before each, it
compares the files with their last contents, so that writes of C++ and Rust are noted too. `Disk` keeps what has reached
the disk, and all later changes. A file system may bring any part of those to the disk: `Disk.write` makes such a state.

An fsync of a file brings its content to the disk, and an fsync of a folder its names. Nothing more is assumed.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir")


class Change(NamedTuple):
    """One noted change."""

    kind: str
    """write, name, gone or sync."""

    inode: int
    """The file that is written or synced; the folder of a name."""

    name: str = ""
    """The name, or the path of what is synced."""

    target: int = 0
    """The inode that a name leads to."""

    before: str = ""
    """The name that the target had in this folder before a rename."""

    offset: int = 0
    data: bytes = b""
    size: int = 0
    """Bytes of the file after a write."""


class Trace:
    """Changes of a folder in the order in which they were made."""

    def __init__(self, root: Path) -> None:
        self.root, self.changes = root, []
        self.folders = {1}
        self.marks: list[tuple[int, str, dict[str, bytes]]] = []
        """Moments: the number of changes so far, a label, and the files that are asked for there."""

        self.lock = RLock()
        self._inodes = {".": 1}
        self._contents: dict[int, bytes] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}

    changes: list[Change]

    def inside(self, path: Any) -> str | None:
        """Returns the path below the folder, or None if it is elsewhere."""
        try:
            return Path(os.path.abspath(os.fspath(path))).relative_to(self.root).as_posix()
        except (TypeError, ValueError):
            return None

    def look(self) -> None:
        """Notes all changes since the last look."""
        paths = {path.relative_to(self.root).as_posix(): path for path in sorted(self.root.rglob("*"))}
        for name in sorted(self._inodes.keys() - paths.keys() - {"."}, reverse=True):
            self.changes.append(Change("gone", *self._entry(name), self._inodes.pop(name)))
        statuses = {name: path.stat() for name, path in paths.items()}
        known = {status.st_ino: name for name, status in statuses.items() if name in self._inodes}
        for name, path in paths.items():
            status = statuses[name]
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if name not in self._inodes:
                new = 1 + max(self._inodes.values(), default=1) + len(self.changes)
                self._inodes[name] = self._inodes.get(known.get(status.st_ino, ""), new)  # a link has its file's number
                self.changes.append(Change("name", *self._entry(name), self._inodes[name]))
            elif self._stamps.get(name) == stamp and status.st_size > 65_536:
                continue  # a clock may be too coarse for small files that are written twice
            self._stamps[name] = stamp
            if path.is_dir():
                self.folders.add(self._inodes[name])
            else:
                self._compare(self._inodes[name], path.read_bytes())

    def renamed(self, old: str, new: str) -> None:
        """Notes that a file or a folder has another name in the same folder."""
        for name in [name for name in self._inodes if name == old or name.startswith(f"{old}/")]:
            self._inodes[new + name[len(old) :]] = self._inodes.pop(name)
        folder, last = self._entry(new)
        self.changes.append(Change("name", folder, last, self._inodes[new], before=self._entry(old)[1]))

    def synced(self, name: str) -> None:
        """Notes an fsync, unless a thread has deleted the file meanwhile."""
        if name in self._inodes:
            self.changes.append(Change("sync", self._inodes[name], name))

    def _entry(self, name: str) -> tuple[int, str]:
        folder, _, last = name.rpartition("/")
        return self._inodes.get(folder or ".", 0), last

    def _compare(self, inode: int, content: bytes) -> None:
        before = self._contents.get(inode, b"")
        if content != before:
            pairs = enumerate(zip(before, content, strict=False))
            shared = next((place for place, (old, new) in pairs if old != new), min(len(before), len(content)))
            self.changes.append(Change("write", inode, offset=shared, data=content[shared:], size=len(content)))
            self._contents[inode] = content


@contextmanager
def recorded(root: Path, marks: Mapping[str, tuple[Any, str, Callable[[], dict[str, bytes]]]]) -> Iterator[Trace]:
    """Context manager that yields the trace of a folder, which must exist and be empty.

    Args:
        root: The folder.
        marks: By label, a function (its owner and name) after whose calls a moment is kept, and the files to keep.
            The label of the moment ends in the name of the function's first argument.
    """
    trace = Trace(root)
    originals = {name: getattr(os, name) for name in CALLS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside = trace.inside(os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[0])
            if inside is None or kwargs.get("dir_fd") is not None:  # the next look sees the rest
                return originals[name](*args, **kwargs)
            with trace.lock:
                trace.look()
                result = originals[name](*args, **kwargs)
                if name == "fsync":
                    trace.synced(inside)
                elif name in ("replace", "rename"):
                    trace.renamed(inside, str(trace.inside(args[1])))
                return result

        return call

    def marked(label: str, original: Callable[..., Any], files: Callable[[], dict[str, bytes]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            with trace.lock:
                trace.look()
                trace.marks.append((len(trace.changes), f"{label} {getattr(args[0], 'name', '')}".strip(), files()))
            return result

        return call

    owned = {label: getattr(owner, name) for label, (owner, name, _) in marks.items()}
    for label, (owner, name, files) in marks.items():
        setattr(owner, name, marked(label, owned[label], files))
    for name in CALLS:
        setattr(os, name, watched(name))
    try:
        yield trace
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
        for label, (owner, name, _) in marks.items():
            setattr(owner, name, owned[label])
        trace.look()


@dataclass
class Inode:
    """File or folder: its state on the disk, and the changes since."""

    content: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def settle(self, change: Change) -> None:
        """Applies a change."""
        if change.kind == "write":
            grown = self.content.ljust(change.offset, b"\0")[: change.offset] + change.data
            self.content = (grown + self.content[len(grown) :])[: change.size].ljust(change.size, b"\0")
        elif change.kind == "name":
            self.names.pop(change.before, None)
            self.names[change.name] = change.target
        elif self.names.get(change.name) == change.target:
            del self.names[change.name]


class Disk:
    """Disk after some changes of a trace."""

    def __init__(self, trace: Trace, lies: Callable[[str], bool]) -> None:
        """Starts with an empty folder.

        Args:
            trace: The trace.
            lies: Returns True if an fsync of this path does nothing.
        """
        self._folders, self._lies = trace.folders, lies
        self._inodes: dict[int, Inode] = {}

    def apply(self, change: Change) -> None:
        """Takes in the next change."""
        inode = self._inodes.setdefault(change.inode, Inode())
        if change.kind != "sync":
            inode.pending.append(change)
        elif not self._lies(change.name):
            for pending in inode.pending:
                inode.settle(pending)
            inode.pending = []

    def write(self, path: Path, persists: Callable[[Change], Change | None], number: int = 1) -> None:
        """Writes a state of the disk to a new folder. `persists` returns what remains of a change, if anything."""
        known = self._inodes.get(number, Inode())
        inode = Inode(known.content, dict(known.names))
        for change in known.pending:
            if (remains := persists(change)) is not None:
                inode.settle(remains)
        if number not in self._folders:
            path.write_bytes(inode.content)
            return
        path.mkdir()
        for name, target in inode.names.items():
            self.write(path / name, persists, target)


def _torn(change: Change, chance: random.Random) -> Change:
    """Returns a write of which a part reached the disk: all, its start, zeros in its place, or zeros and its end."""
    way, place = chance.randrange(6), chance.randrange(len(change.data) + 1)
    if change.kind != "write" or way > 2:
        return change
    if way == 0:
        return change._replace(data=change.data[:place], size=change.offset + place)
    return change._replace(data=bytes(len(change.data)) if way == 1 else bytes(place) + change.data[place:])


WAYS: Mapping[str, Callable[..., Change | None]] = {
    "nothing": lambda change, chance: None,
    "everything": lambda change, chance: change,
    "names alone": lambda change, chance: None if change.kind == "write" else change,
    "contents alone": lambda change, chance: change if change.kind == "write" else None,
    "half": lambda change, chance: _torn(change, chance) if chance.random() < 0.5 else None,
    "almost everything": lambda change, chance: _torn(change, chance) if chance.random() < 0.9 else None,
}
"""Parts of the unsynced changes that reach the disk. The last two are random, and writes may be torn."""


class Crash(NamedTuple):
    """One crash point and one state after it."""

    point: int
    way: str
    write: Callable[[Path], None]


def lies_outside_checkpoints(path: str) -> bool:
    """Returns True for the run's own files and for the record: a disk that loses them although they were synced."""
    return path.startswith("records") or path.endswith((".json", ".jsonl", ".toml"))


def crashes(
    trace: Trace, number: int, *, first: int = 1, lies: Callable[[str], bool] = lambda path: False
) -> Iterator[Crash]:
    """Yields crashes, spread evenly over the changes. Write each state before the next one is taken.

    Args:
        trace: The trace.
        number: Number of crashes.
        first: Number of changes before the first crash.
        lies: Returns True if an fsync of this path does nothing.
    """
    disk, applied, total = Disk(trace, lies), 0, len(trace.changes)
    for index in range(number):
        point = first + index * (total - first) // max(1, number - 1)
        for change in trace.changes[applied:point]:
            disk.apply(change)
        applied = max(applied, point)
        chance = random.Random(f"{first} {index}")
        way = chance.choice(list(WAYS))

        yield Crash(point, way, partial(_write, disk, partial(WAYS[way], chance=chance)))


def _write(disk: Disk, persists: Callable[[Change], Change | None], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    disk.write(folder, persists)
