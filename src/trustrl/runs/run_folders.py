"""Folders with a run inside, found by the names of the files that only a run has."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from trustrl.errors import ConfigError
from trustrl.runs.readers import verl_file
from trustrl.runs.readers.files import Files

DEEPEST_RUN = 3
"""Levels below the given folder in which a single run may lie, such as verl's `tensorboard_log/<project>/<name>`."""

MOST_NAMED = 10

_INSIDE = {
    "recipe.toml": (),
    "trainer_state.json": ("checkpoint-*",),
    "*tfevents*": ("runs", "*"),
    "run-*.wandb": ("wandb", "*run-*"),
    "*.jsonl": (),
}
"""Files that only the folder of a run has, and the folders inside it that trainers and trackers put them into."""


def run_folders(files: Files) -> list[str]:
    """Returns the folders that hold runs, relative to the root. The root itself is an empty string.

    Example:
        >>> run_folders(Files(Path("out"), ("a/checkpoint-4/trainer_state.json", "b/runs/x/events.out.tfevents.1")))
        ['a', 'b']
    """
    return sorted({folder for name in files.names if (folder := _folder_of(files, name)) is not None})


def _folder_of(files: Files, name: str) -> str | None:
    *folders, file = name.split("/")
    inside = next((inside for pattern, inside in _INSIDE.items() if fnmatchcase(file, pattern)), None)
    if inside is None or (file.endswith(".jsonl") and not (folders and verl_file.is_log(files.root / name))):
        return None
    own = folders[-len(inside) :] if inside else []
    made = len(own) == len(inside) and all(map(fnmatchcase, own, inside))
    return "/".join(folders[: len(folders) - len(inside)] if made else folders)


def check_one_run(path: str | Path, files: Files) -> None:
    """Checks that a folder holds one run, at its top or not far below."""
    folders = run_folders(files)
    if not folders or "" in folders:
        return
    if len(folders) > 1:
        more = f" and {len(folders) - MOST_NAMED} more" if len(folders) > MOST_NAMED else ""
        named = ", ".join(folders[:MOST_NAMED])
        raise ConfigError(f"RUN must be one run, got {path}, a folder of runs. Pass one of {named}{more} inside it.")
    if folders[0].count("/") >= DEEPEST_RUN:
        nearest = f"The nearest one is {folders[0]} inside it."
        raise ConfigError(f"RUN must be a run, got {path}, which is not one. {nearest}")


def run_around(folder: Path) -> Iterator[Path]:
    """Yields the folders above that hold a run, nearest first."""
    for parent in folder.resolve().parents[:3]:
        if any((parent / name).is_file() for name in ("recipe.toml", "trainer_state.json")):
            yield parent
