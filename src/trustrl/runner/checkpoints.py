"""Checkpoints of a run: ownership, the one to resume from, and rotation.

Ownership is checked because loading a checkpoint can execute code that another user put into it. `manifests` checks who
wrote a checkpoint and that it is undamaged.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trustrl.errors import ConfigError, EngineError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

SET_ASIDE = "set-aside-"
"""Prefix of a rejected checkpoint's new name. trustrl and the engines ignore directories with this prefix."""

INTERRUPTED = "it was not complete when the run stopped"


def refuse_foreign(run: Path, checkpoint: Path) -> None:
    """Raises if another user could have changed a checkpoint.

    Checks the run's directory, the checkpoint, everything in it, and the directories between the two.
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
        yield from (path for path in folder.iterdir() if path.is_file())


def _below(folder: Path) -> Iterator[Path]:
    yield folder
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


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
    named = ((re.fullmatch(re.escape(prefix) + "(0|[1-9][0-9]{0,17})", path.name), path) for path in folder.iterdir())
    checkpoints = {int(name[1]): path for name, path in named if name and path.is_dir() and not path.is_symlink()}
    return dict(sorted(checkpoints.items(), reverse=True))


class Survey:
    """Search for the newest intact checkpoint of a run. Keeps the rejected ones with the reason.

    Args:
        checkpoints: The checkpoints by step, newest first.
        complete: Returns True if the engine completed the checkpoint.
        fault: Returns the fault of a completed checkpoint, or None.
        loss: Returns what the run has lost before the commit point of an intact checkpoint, or None.
        accept_loss: If there is no better one, chooses the newest intact checkpoint in spite of a loss.
    """

    def __init__(
        self,
        checkpoints: Mapping[int, Path],
        complete: Callable[[Path], bool],
        fault: Callable[[Path], str | None],
        loss: Callable[[Path], str | None] = lambda checkpoint: None,
        *,
        accept_loss: bool = False,
    ) -> None:
        self.step, self.chosen = 0, None
        self.rejected: dict[Path, str] = {}
        self.losses: dict[Path, str] = {}
        for step, checkpoint in checkpoints.items():
            wrong = fault(checkpoint) if complete(checkpoint) else INTERRUPTED
            if wrong is None and (lost := loss(checkpoint)):
                wrong = self.losses[checkpoint] = lost
            if wrong is None:
                self.step, self.chosen = step, checkpoint
                return
            self.rejected[checkpoint] = wrong
        if accept_loss and self.losses:
            self.chosen = next(iter(self.losses))
            newer = list(checkpoints.values()).index(self.chosen)
            self.step = list(checkpoints)[newer]
            self.rejected = dict(list(self.rejected.items())[:newer])

    def refuse_if_none_is_left(self) -> None:
        """Raises if the run completed checkpoints and none of them is intact. Renames nothing."""
        damaged = {checkpoint: wrong for checkpoint, wrong in self.rejected.items() if wrong != INTERRUPTED}
        if self.chosen is None and damaged:
            reasons = "; ".join(f"{checkpoint}: {wrong}" for checkpoint, wrong in damaged.items())
            without = "To continue without what the run has lost, add --accept-loss. " if self.losses else ""
            raise EngineError(
                f"No intact checkpoint is left to resume from. {reasons}. Restore the files from a copy. {without}To "
                "start again from step 0, choose another --out, or move these checkpoints out of the run's directory."
            )

    def set_aside(self, log: Callable[[str], None]) -> None:
        """Renames the rejected checkpoints, so that the engine can write there again, and logs each one."""
        for checkpoint, wrong in self.rejected.items():
            moved = set_aside(checkpoint) if checkpoint.is_dir() else None
            renamed = "" if moved is None else f" It is now {moved.name}. Delete it if you do not need it."
            log(f"warning: {checkpoint.name} is not used: {wrong}.{renamed}")


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
    for checkpoint in list(checkpoints_in(folder, prefix).values())[keep:]:
        if protected is None or checkpoint.resolve() != Path(protected).resolve():
            shutil.rmtree(checkpoint, ignore_errors=True)
