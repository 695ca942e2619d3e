"""Commit point of a run: everything that belongs to a checkpoint, brought to the disk before its manifest.

The metrics, the evaluations and the list of commits are files that only grow, so a commit point is a length and a hash
of each. The list of commits, commits.jsonl, has one object for each checkpoint: the steps whose rows it added, and the
record files that it added with their bytes and SHA-256. The cost of a commit follows the steps since the last one.

On resume, the files are compared with the commit point of a checkpoint. Whatever lies behind it is cut off and kept in
a file next to it. If something before it is lost, the checkpoint is not used (`checkpoints.Survey`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trustrl.files import LARGEST, lines_of, open_regular, parsed_json, sync, write_whole
from trustrl.recording.committed_files import fault_of_file, files_of_steps
from trustrl.recording.record_files import RECORDS, RUN, FileGone, read_again
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import THREADS, is_entry, run_files_of, shown, synced_and_hashed

COMMITS = "commits.jsonl"
ROWS = ("metrics.jsonl", "evaluation.jsonl")
"""Files that result.json is computed from."""

DROPPED = ".dropped"
"""Suffix of the file that keeps rows behind a commit point. No reader of runs opens it."""

NAMED = 8
"""Largest number of lost record files in a message."""


class Committer:
    """Writer of commit points. Create it after `take_back`."""

    def __init__(self, directory: RunDirectory) -> None:
        """Reads the commits so far."""
        self._directory = directory
        self._rows = {name: _Prefix(directory.path / name) for name in ROWS}
        self._commits = _Prefix(directory.path / COMMITS)
        last = parsed_json(self._commits.extend_by_all() or b"{}")
        self._next = 1 + last.get("recorded", -1)
        for prefix in self._rows.values():
            prefix.extend(last.get("step", -1))

    def commit(self, step: int, recorded: int) -> dict[str, dict[str, Any]]:
        """Brings the run's files up to a step to the disk, and returns their entries for the manifest.

        Args:
            step: The step of the checkpoint.
            recorded: The last step of the record that the checkpoint covers, as the record counts.
        """
        folder = self._directory.path
        entry: dict[str, Any] = {"step": step, "recorded": recorded}
        for name, prefix in self._rows.items():
            entry[name] = {"steps": prefix.extend(step), **prefix.entry}
        files = read_again(lambda: _record_files(folder / RECORDS, range(self._next, recorded + 1)))
        entry["files"] = {name: listed for name, (_, listed) in files.items()}
        self._next = max(self._next, recorded + 1)
        with (folder / COMMITS).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(entry) + "\n")
        self._commits.extend_by_all()
        grown = (prefix.file for prefix in (*self._rows.values(), self._commits))
        folders = {path.parent for path, _ in files.values()} | {folder / RECORDS, folder}
        for path in (*grown, folder / RECORDS / RUN, *folders):
            if path.exists():
                sync(path)
        return {prefix.file.name: prefix.entry for prefix in (*self._rows.values(), self._commits)}


def _record_files(folder: Path, steps: range) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns the record files of these steps, brought to the disk, each with its bytes and SHA-256."""
    files = files_of_steps(folder, steps)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            listed = list(pool.map(synced_and_hashed, files.values()))
    except FileNotFoundError as error:
        raise FileGone(f"`{error.filename}` was merged into another file") from error
    return {name: (files[name], entry) for name, entry in zip(files, listed, strict=True)}


class _Prefix:
    """Complete lines of a file up to a step, hashed as they are added."""

    def __init__(self, file: Path) -> None:
        self.file, self._size, self._hash = file, 0, hashlib.sha256()

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def extend_by_all(self) -> bytes:
        """Adds all complete lines, and returns the last of them."""
        last = b""
        with open_regular(self.file) if self.file.exists() else open(os.devnull, "rb") as opened:
            opened.seek(self._size)
            for line in lines_of(opened, LARGEST):
                if line.endswith(b"\n"):
                    self._hash.update(line)
                    self._size += len(line)
                    last = line
        return last

    def extend(self, step: int) -> list[int]:
        """Adds the lines up to a step, and returns their steps."""
        steps: list[int] = []
        if not self.file.exists():
            return steps
        with open_regular(self.file) as opened:
            opened.seek(self._size)
            for line in lines_of(opened):
                if not line.endswith(b"\n") or (of_line := parsed_json(line)["step"]) > step:
                    break
                steps.append(of_line)
                self._hash.update(line)
                self._size += len(line)
        return steps


def loss_before(directory: RunDirectory, checkpoint: Path) -> str | None:
    """Returns a description of what the run has lost before the commit point of an intact checkpoint, or None."""
    covered = run_files_of(checkpoint)
    losses = {name: loss for name in (*ROWS, COMMITS) if name in covered and (loss := _lost(directory, name, covered))}
    lost_files = (
        [] if COMMITS in losses or COMMITS not in covered else _lost_records(directory, covered[COMMITS]["bytes"])
    )
    return "; ".join((*losses.values(), *lost_files)) or None


def _lost(directory: RunDirectory, name: str, covered: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Describes the loss in a file that grows: its bytes, and the steps whose rows are missing or changed."""
    listed, file = covered[name], directory.path / name
    size = file.stat().st_size if file.is_file() else 0
    if size >= listed["bytes"] and _hash_of_start(file, listed["bytes"]) == listed["sha256"]:
        return None
    got = f"has {size:,} bytes of {listed['bytes']:,}" if size < listed["bytes"] else "has changed"
    if not file.is_file():
        got = "is missing"
    if name == COMMITS:
        return f"{name} {got}, so the files of the record cannot be checked"
    commits = list(_commits(directory.path / COMMITS, covered[COMMITS]["bytes"]))
    committed = {step for commit in commits for step in commit[name]["steps"]}
    absent = committed - {row["step"] for row in _readable_rows(file, listed["bytes"])}
    if absent:
        return f"{name} {got}: lost are the rows of {_steps(absent)}"
    intact = _intact(file, [commit[name] for commit in commits])
    behind = {step for commit in commits[intact:] for step in commit[name]["steps"]}
    return f"{name} {got}, in the rows of {_steps(behind)}" if behind else f"{name} {got}"


def _intact(file: Path, extents: list[dict[str, Any]]) -> int:
    """Returns the number of extents, from the first on, that a file still has. Reads it once."""
    start, size = hashlib.sha256(), 0
    with open_regular(file) if file.is_file() else open(os.devnull, "rb") as opened:
        for number, extent in enumerate(extents):
            start.update(opened.read(max(0, extent["bytes"] - size)))
            size = extent["bytes"]
            if start.hexdigest() != extent["sha256"]:
                return number
    return len(extents)


def _lost_records(directory: RunDirectory, size: int) -> list[str]:
    """Describes the record files that the first `size` bytes of the commits list and that are missing or damaged."""
    files = {
        name: listed for commit in _commits(directory.path / COMMITS, size) for name, listed in commit["files"].items()
    }
    folder = directory.path / RECORDS
    with ThreadPoolExecutor(THREADS) as pool:
        faults = zip(files, pool.map(lambda name: fault_of_file(folder, name, files[name]), files), strict=True)
        lost = [f"{RECORDS}/{shown(name)} {fault}" for name, fault in faults if fault]
    more = [f"and {len(lost) - NAMED:,} more record files"] if len(lost) > NAMED else []
    return lost[:NAMED] + more


def take_back(
    directory: RunDirectory, checkpoint: Path | None, step: int, loss: str | None, log: Callable[[str], None]
) -> None:
    """Returns the run's files to the commit point of the checkpoint that is resumed from. Deletes no row.

    Args:
        directory: The run.
        checkpoint: The checkpoint, or None to start from step 0.
        step: Its step.
        loss: What the run has lost before this commit point, if the user accepts that.
        log: Receives a line for everything that is dropped or cannot be checked.
    """
    covered = {} if checkpoint is None else run_files_of(checkpoint)
    if loss is not None:
        log(f"warning: continuing without what is lost: {loss}.")
        _salvage(directory, step, covered[COMMITS]["bytes"], log)
    elif checkpoint is None or covered:
        for name in (*ROWS, COMMITS):
            _cut(directory.path / name, covered.get(name, {"bytes": 0})["bytes"], step, log)
    else:
        log(
            f"warning: {checkpoint.name} does not list the run's files, because an older trustrl wrote it. Metrics, "
            f"evaluations and records up to step {step} could not be checked: after a power failure, compare them "
            "with what you expect. The next checkpoint lists them."
        )
        _salvage(directory, step, 0, log)
    directory.note(resumed_after=step, lost=[] if loss is None else [loss])


def _cut(file: Path, size: int, step: int, log: Callable[[str], None]) -> None:
    """Moves the end of a file to a file next to it."""
    if not file.exists() or file.stat().st_size <= size:
        return
    with open_regular(file) as opened:
        opened.seek(size)
        _keep(file, opened.read(), step, log)
    os.truncate(file, size)
    sync(file)


def _keep(file: Path, dropped: bytes, step: int, log: Callable[[str], None]) -> None:
    kept = file.with_name(file.name + DROPPED)
    with kept.open("ab") as opened:
        opened.write(dropped if dropped.endswith(b"\n") else dropped + b"\n")
        opened.flush()
        os.fsync(opened.fileno())
    if file.name in ROWS:
        log(f"took back {len(dropped.splitlines()):,} rows of {file.name} after step {step}; {kept.name} keeps them")


def _salvage(directory: RunDirectory, step: int, size: int, log: Callable[[str], None]) -> None:
    """Keeps the rows up to a step that can be read, and lists the record files that are intact as one commit."""
    commits = directory.path / COMMITS
    listed = list(_commits(commits, size))
    files = {name: entry for commit in listed for name, entry in commit["files"].items()}
    folder = directory.path / RECORDS
    whole = {name: entry for name, entry in files.items() if fault_of_file(folder, name, entry) is None}
    for name in ROWS:
        file = directory.path / name
        content = file.read_bytes() if file.is_file() else b""
        kept = {line: None for line, row in _parsed_lines(content) if row["step"] <= step}
        dropped = [line for line in content.splitlines(keepends=True) if line not in kept]
        if dropped:
            _keep(file, b"".join(dropped), step, log)
            write_whole(file, b"".join(kept).decode(), synced=True)
    if commits.exists():
        _keep(commits, commits.read_bytes(), step, log)
        commits.unlink()
    if listed:
        empty = {name: {"steps": [], "bytes": 0, "sha256": hashlib.sha256().hexdigest()} for name in ROWS}
        adopted = {"step": -1, "recorded": listed[-1]["recorded"], **empty, "files": whole}
        write_whole(commits, json.dumps(adopted) + "\n", synced=True)


def _commits(file: Path, size: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the commits in the first `size` bytes, without lines that are damaged."""
    if not file.is_file():
        return
    with open_regular(file) as opened:
        for _, commit in _parsed_lines(opened.read() if size is None else opened.read(size)):
            files = commit.get("files")
            sound = isinstance(commit.get("recorded"), int) and all(_is_extent(commit.get(name)) for name in ROWS)
            if sound and isinstance(files, dict) and all(map(is_entry, files.values())):
                yield commit


def _is_extent(value: Any) -> bool:
    """Returns True for the steps, the bytes and the SHA-256 that a commit lists for a file of rows."""
    if not isinstance(value, dict) or not isinstance(steps := value.get("steps"), list):
        return False
    return is_entry({key: x for key, x in value.items() if key != "steps"}) and all(type(x) is int for x in steps)


def _readable_rows(file: Path, size: int) -> Iterator[dict[str, Any]]:
    with open_regular(file) if file.is_file() else open(os.devnull, "rb") as opened:
        yield from (row for _, row in _parsed_lines(opened.read(size)))


def _parsed_lines(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each complete line that is an object with a step."""
    for line in content.splitlines(keepends=True):
        try:
            row = parsed_json(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _hash_of_start(file: Path, size: int) -> str:
    """Returns the SHA-256 of the first bytes of a file."""
    if not file.is_file():
        return hashlib.sha256().hexdigest() if size == 0 else ""
    start, left = hashlib.sha256(), size
    with open_regular(file) as opened:
        while left > 0 and (piece := opened.read(min(left, 1 << 20))):
            start.update(piece)
            left -= len(piece)
    return start.hexdigest()


def _steps(steps: set[int]) -> str:
    """Returns steps as text, consecutive ones as a range.

    Example:
        >>> _steps({0}), _steps({3, 4, 5, 6, 9})
        ('step 0', 'steps 3 to 6, 9')
    """
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown_runs = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    return f"step{'s' * (len(steps) > 1)} {shown_runs}"
