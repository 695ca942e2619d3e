"""Checkpoints of a run: completeness, ownership, the one to resume from, and rotation.

A manifest lists a checkpoint's files with sizes and SHA-256. It is written last and verified before a resume. Ownership
is checked too, because loading a checkpoint can execute code that another user put into it.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, EngineError

MANIFEST = "trustrl_complete"
"""Name of the manifest in a checkpoint. It is written last, because a kill may come during a save."""

VERSION = 1
PICKLES = (".pt", ".pth")

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

SET_ASIDE = "set-aside-"
"""Prefix of a rejected checkpoint's new name. trustrl and the engines ignore directories with this prefix."""

INTERRUPTED = "it was not complete when the run stopped"


def write_manifest(checkpoint: Path) -> None:
    """Lists the files of a complete checkpoint, after all of them have reached the disk."""
    files = {}
    for name, path in sorted(_files(checkpoint)):
        _sync(path)
        files[name] = _sized_and_hashed(path)
    scratch = checkpoint / f".{MANIFEST}.{os.getpid()}"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, "name": checkpoint.name, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, checkpoint / MANIFEST)
    for folder in (checkpoint, checkpoint.parent):
        _sync(folder)


def fault_of(checkpoint: Path) -> str | None:
    """Returns the fault of a checkpoint, or None if it is intact.

    With a manifest, every listed file must have its size and its SHA-256. Without one (trustrl 0.1.0 wrote none), this
    checks only the file formats, which finds a truncated file but not a changed one.
    """
    found = dict(_files(checkpoint))
    if not found:
        return "it contains no files"
    try:
        written = (checkpoint / MANIFEST).read_bytes() if (checkpoint / MANIFEST).is_file() else b""
        if not written:
            return next((wrong for name, path in sorted(found.items()) if (wrong := _format_fault(name, path))), None)
        return _difference(checkpoint.name, _listed(written), found)
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"


def _listed(written: bytes) -> Mapping[str, Any] | None:
    """Returns the manifest, or None if it is damaged."""
    try:
        manifest = json.loads(written.decode())
        sound = isinstance(manifest["files"], dict) and all(isinstance(x, dict) for x in manifest["files"].values())
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return manifest if sound and manifest.get("version") == VERSION else None


def _difference(name: str, manifest: Mapping[str, Any] | None, found: Mapping[str, Path]) -> str | None:
    if manifest is None:
        return f"its manifest, {MANIFEST}, is damaged"
    if manifest.get("name") != name:
        return f"its manifest belongs to {manifest.get('name')!r:.60}"
    files = manifest["files"]
    for one, listed in files.items():  # sizes first: they need no reading
        if one not in found:
            return f"{one} is missing"
        if found[one].stat().st_size != listed.get("bytes"):
            return f"{one} has {found[one].stat().st_size:,} bytes, but its manifest lists {listed.get('bytes')!r:.30}"
    changed = next((one for one in files if _sized_and_hashed(found[one]) != files[one]), None)
    return None if changed is None else f"{changed} has changed since it was written"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields every regular file in a checkpoint's directory except the manifest, with its relative path."""
    for at, _, names in os.walk(folder):
        for name in names:
            path = Path(at, name)
            if path.is_file() and not path.name.startswith((MANIFEST, f".{MANIFEST}")):
                yield path.relative_to(folder).as_posix(), path


def _sized_and_hashed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Waits until a file or a directory has reached the disk."""
    if os.name != "posix":
        return  # other systems can only sync a file that is open for writing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _format_fault(name: str, path: Path) -> str | None:
    if path.suffix in PICKLES and not zipfile.is_zipfile(path):
        return f"{name} is truncated"
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes().decode())
        except (ValueError, RecursionError):
            return f"{name} is not JSON"
    if path.suffix == ".safetensors" and path.stat().st_size != _safetensors_size(path):
        return f"{name} is truncated"
    return None


def _safetensors_size(path: Path) -> int | None:
    """Returns the file size according to a safetensors header, or None if the header is unreadable."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length).decode()) if length < path.stat().st_size else {}
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
            return 8 + length + max(ends)
        except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
            return None


def refuse_foreign(run: Path, checkpoint: Path) -> None:
    """Raises if another user could have changed a checkpoint.

    Checks the run's directory, the checkpoint, everything in it, and the directories between the two.

    Raises:
        ConfigError: If another user owns one of them or can write to it, or one of them is a symbolic link.
    """
    if not hasattr(os, "geteuid"):
        return  # Windows has no user ids
    for path in (run.resolve(), *_between(run, checkpoint), *_below(checkpoint)):
        reason = _foreign(path)
        if reason is not None:
            raise ConfigError(
                f"A checkpoint must be writable by you alone, got {checkpoint}: {path} {reason}. Loading a checkpoint "
                "can execute code that another user put into it. If you trust everything in the run's directory, "
                f"change its owner and mode (`chown -R`, `chmod -R go-w {run}`) or add --trust-checkpoint."
            )


@contextmanager
def only_the_owner_writes() -> Iterator[None]:
    """Makes files that this process and its children create writable by their owner only, regardless of the umask."""
    before = os.umask(0o077)
    os.umask(before | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def _between(run: Path, checkpoint: Path) -> Iterator[Path]:
    """Yields the directories from the run's own down to the checkpoint's, and the plain files in them.

    A directory may be a link to another disk; then its target is checked.
    """
    for folder in checkpoint.parents:
        if folder == run:
            return
        yield folder.resolve()
        yield from (one for one in folder.iterdir() if one.is_file())


def _below(folder: Path) -> Iterator[Path]:
    yield folder
    for at, folders, files in os.walk(folder):
        yield from (Path(at, name) for name in (*folders, *files))


def _foreign(path: Path) -> str | None:
    try:
        status, me = path.lstat(), os.geteuid()
    except FileNotFoundError:
        return None  # another rank has just renamed it
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid != me:
        return f"belongs to the user with id {status.st_uid}, but your id is {me}"
    if status.st_mode & OTHERS_WRITE:
        return f"is writable by {'everybody' if status.st_mode & stat.S_IWOTH else 'its group'}"
    return None


def checkpoints_in(folder: Path, prefix: str) -> dict[int, Path]:
    """Returns the checkpoints by step, newest first: real directories named `<prefix><digits>`, and nothing else."""
    if not folder.is_dir():
        return {}
    named = ((re.fullmatch(re.escape(prefix) + "(0|[1-9][0-9]{0,17})", one.name), one) for one in folder.iterdir())
    found = {int(name[1]): one for name, one in named if name and one.is_dir() and not one.is_symlink()}
    return dict(sorted(found.items(), reverse=True))


def is_marked(checkpoint: Path) -> bool:
    """Returns True if the checkpoint has a manifest, which means that it was completed."""
    return (checkpoint / MANIFEST).is_file()


class Survey:
    """Search for the newest intact checkpoint of a run. Keeps the rejected ones with the reason.

    Args:
        found: The checkpoints by step, newest first.
        complete: Returns True if the engine completed the checkpoint.
        fault: Returns the fault of a completed checkpoint, or None.
    """

    def __init__(
        self,
        found: Mapping[int, Path],
        complete: Callable[[Path], bool],
        fault: Callable[[Path], str | None] = fault_of,
    ) -> None:
        self.step, self.chosen = 0, None
        self.rejected: dict[Path, str] = {}
        for step, one in found.items():
            wrong = fault(one) if complete(one) else INTERRUPTED
            if wrong is None:
                self.step, self.chosen = step, one
                return
            self.rejected[one] = wrong

    def refuse_if_none_is_left(self) -> None:
        """Raises if the run completed checkpoints and none of them is intact. Renames nothing.

        Raises:
            EngineError: If no checkpoint is left to resume from.
        """
        damaged = {one: wrong for one, wrong in self.rejected.items() if wrong != INTERRUPTED}
        if self.chosen is None and damaged:
            reasons = "; ".join(f"{one}: {wrong}" for one, wrong in damaged.items())
            raise EngineError(
                f"No intact checkpoint is left to resume from. {reasons}. Restore the files from a copy. To start "
                "again from step 0, choose another --out, or move these checkpoints out of the run's directory."
            )

    def set_aside(self, log: Callable[[str], None]) -> None:
        """Renames the rejected checkpoints, so that the engine can write there again, and logs each one."""
        for one, wrong in self.rejected.items():
            moved = set_aside(one) if one.is_dir() else None
            renamed = "" if moved is None else f" It is now {moved.name}. Delete it if you do not need it."
            log(f"warning: {one.name} is not used: {wrong}.{renamed}")


def set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint and returns its new path. Never overwrites anything."""
    wanted = checkpoint.with_name(SET_ASIDE + checkpoint.name)
    free, number = wanted, 1
    while os.path.lexists(free):
        number += 1
        free = wanted.with_name(f"{wanted.name}.{number}")
    return checkpoint.rename(free)


def rotate(folder: Path, prefix: str, keep: int, protected: str | None = None) -> None:
    """Deletes all but the `keep` newest checkpoints, by step. Never touches directories with other names."""
    for one in list(checkpoints_in(folder, prefix).values())[keep:]:
        if protected is None or one.resolve() != Path(protected).resolve():
            shutil.rmtree(one, ignore_errors=True)
