"""Ownership check before a checkpoint is loaded: loading one can execute code that somebody else put into it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trustrl.errors import ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def refuse_foreign(run: Path, checkpoint: Path) -> None:
    """Checks the run's directory, the checkpoint, everything in it, and what lies between.

    Raises:
        ConfigError: another user owns one of them or can write to it, or it is a symbolic link.
    """
    if not hasattr(os, "geteuid"):
        return  # Windows has no such owners
    for path in (run.resolve(), *_between(run, checkpoint), *_below(checkpoint)):
        reason = _foreign(path)
        if reason is not None:
            raise ConfigError(
                f"A checkpoint must be one that only you can write, got {checkpoint}: {path} {reason}. Loading a "
                "checkpoint can execute code that others put into it. If you trust everything in the run's directory, "
                f"take it over (`chown -R`, `chmod -R go-w {run}`) or add --trust-checkpoint."
            )


@contextmanager
def only_the_owner_writes() -> Iterator[None]:
    """While active, files that this process and its children create are not writable by others, whatever the umask."""
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
        return None  # another rank has just set it aside
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid != me:
        return f"belongs to the user with id {status.st_uid}, and you are {me}"
    if status.st_mode & OTHERS_WRITE:
        return f"can be written by {'everybody' if status.st_mode & stat.S_IWOTH else 'its group'}"
    return None
