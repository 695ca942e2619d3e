"""The names of files in a folder of records, and what a process removes there before it writes its own."""

from contextlib import suppress
from pathlib import Path

RECORDS = "records"
"""Where in a run's folder its records are."""


def part_name(step: int, rank: int) -> str:
    """The file of one step on one rank."""
    return f"step-{step:08d}.rank-{rank:04d}.parquet"


def parts_in(folder: Path) -> list[Path]:
    """A folder's own part files by step and rank; dumps are folders of their own."""
    return sorted(folder.glob("step-*.parquet"))


def dump_name(step: int) -> str:
    """The folder of what was kept when a trigger fired at this step."""
    return f"dump-{step:08d}"


def about_name(rank: int) -> str:
    """The file that says why a dump was made."""
    return f"trigger.rank-{rank:04d}.json"


def remove_unfinished(folder: Path, rank: int) -> None:
    """Deletes what a killed process of this rank has left behind."""
    for path in folder.rglob(f".*.rank-{rank:04d}.*.tmp"):
        path.unlink(missing_ok=True)


def remove_from(folder: Path, step: int, rank: int) -> None:
    """Deletes this rank's files of a step and of all later ones, in dumps that were made from this step on too."""
    for path in folder.glob(f"step-*.rank-{rank:04d}.parquet"):
        if path.name >= part_name(step, rank):
            path.unlink()
    for dump in folder.glob("dump-*"):
        if dump.name >= dump_name(step):
            for path in dump.glob(f"*.rank-{rank:04d}.*"):
                path.unlink()
            with suppress(OSError):  # other ranks' files are in it, or one of them was faster
                dump.rmdir()
