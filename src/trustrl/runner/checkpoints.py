"""Checkpoints in a run's directory: the one a run resumes from, those set aside, and those no longer needed."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from trustrl.errors import EngineError
from trustrl.runner.manifest import MANIFEST, fault_of

SET_ASIDE = "set-aside-"
"""Start of a checkpoint's new name. Neither trustrl nor an engine looks at directories with such names."""

INTERRUPTED = "it was not complete when the run stopped"


def checkpoints_in(folder: Path, prefix: str) -> dict[int, Path]:
    """Returns the checkpoints by step, newest first: real directories named `<prefix><digits>`, and nothing else."""
    if not folder.is_dir():
        return {}
    named = ((re.fullmatch(re.escape(prefix) + "(0|[1-9][0-9]{0,17})", one.name), one) for one in folder.iterdir())
    found = {int(name[1]): one for name, one in named if name and one.is_dir() and not one.is_symlink()}
    return dict(sorted(found.items(), reverse=True))


def is_marked(checkpoint: Path) -> bool:
    """Whether a manifest says that the checkpoint was completed."""
    return (checkpoint / MANIFEST).is_file()


class Survey:
    """Checkpoints of a run, examined from the newest to the first whole one.

    Args:
        found: The checkpoints by step, newest first.
        complete: Whether the engine had completed a checkpoint.
        fault: Returns what is wrong with a completed one, or None.
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
        """Stops where the run had completed checkpoints and none of them is whole. Nothing has been renamed.

        Raises:
            EngineError: there is no checkpoint to resume from.
        """
        damaged = {one: wrong for one, wrong in self.rejected.items() if wrong != INTERRUPTED}
        if self.chosen is None and damaged:
            reasons = "; ".join(f"{one}: {wrong}" for one, wrong in damaged.items())
            raise EngineError(
                f"No whole checkpoint is left to resume from. {reasons}. Restore the files from a copy. To start again "
                "from step 0, choose another --out, or move these checkpoints out of the run's directory."
            )

    def set_aside(self, say: Callable[[str], None]) -> None:
        """Renames what was rejected, so that the engine can write there again, and says so."""
        for one, wrong in self.rejected.items():
            moved = set_aside(one) if one.is_dir() else None
            said = "" if moved is None else f" It is now {moved.name}. Delete it if you do not need it."
            say(f"warning: {one.name} is not used: {wrong}.{said}")


def set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint and returns its new path. Nothing is overwritten."""
    wanted = checkpoint.with_name(SET_ASIDE + checkpoint.name)
    free, number = wanted, 1
    while os.path.lexists(free):
        number += 1
        free = wanted.with_name(f"{wanted.name}.{number}")
    return checkpoint.rename(free)


def rotate(folder: Path, prefix: str, keep: int, protected: str | None = None) -> None:
    """Deletes all but the `keep` newest checkpoints, by step. Directories with other names are never touched."""
    for one in list(checkpoints_in(folder, prefix).values())[keep:]:
        if protected is None or one.resolve() != Path(protected).resolve():
            shutil.rmtree(one, ignore_errors=True)
