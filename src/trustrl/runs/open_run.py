"""Opens a run that any trainer or tracker wrote. No torch.

Several readers may contribute to one folder: metrics from a trainer state, completions from its dumps, settings from a
tracker. `Run.source` and `Run.found` list them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.runs.part import Part, merged
from trustrl.runs.readers import (
    exports,
    mlflow,
    prime_rl,
    slime,
    tensorboard,
    trackio,
    trl_completions,
    trl_output,
    trustrl_directory,
    verl_config,
    verl_console,
    verl_dumps,
    verl_file,
    wandb_offline,
)
from trustrl.runs.readers.files import Files, files_of
from trustrl.runs.run import Run

READERS: tuple[Any, ...] = (
    trl_output, verl_file, verl_console, verl_dumps, verl_config, prime_rl, slime, wandb_offline, trackio,
    mlflow, tensorboard,
)  # fmt: skip
"""Readers of a folder or file, in order of preference. Each has a NAME, a phrase in LOOKS_FOR, and `read`."""

MOST_FAULTS = 20
"""Entries of a folder that are named as unfit to be read."""

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


def open_run(path: str | Path) -> Run:
    """Opens the run in a folder or file.

    Damaged parts of files are left out and listed in `Run.faults`.

    Args:
        path: A run directory of `trustrl run`, TRL's output_dir, a folder with verl's logs and dumps, or a file that a
            tracker wrote. Append `::<name>` to choose one run of a database that has several.
            docs/reference/run-formats.md lists all formats.

    Raises:
        ConfigError: If no known format is found.
        RecordError: If a file of `trustrl run` cannot be read.
    """
    address, _, run = str(path).partition("::")
    folder = Path(address)
    if not (folder.is_dir() or folder.is_file()):
        got = "another kind of file" if folder.exists() else "nothing there"
        raise ConfigError(f"RUN must be a folder or file that exists, got {path}: {got}.")
    files = files_of(folder, run or None)
    check_one_run(path, files)
    parts = _parts(files)
    if files.faults and parts:
        parts[0].faults += files.faults[:MOST_FAULTS]
        if len(files.faults) > MOST_FAULTS:
            more = len(files.faults) - MOST_FAULTS
            parts[0].faults.append(f"{more:,} other entries are not regular files; left out")
    if not any(part.rows or part.evaluations or part.completions or part.records or part.recipe for part in parts):
        raise ConfigError(_nothing(path, files, parts))
    resolved = folder.resolve()
    return merged(parts, str(path), resolved.stem if folder.is_file() else resolved.name)


def _parts(files: Files) -> list[Part]:
    ours = trustrl_directory.read(files)
    if ours:
        (run,) = ours
        records = trustrl_directory.records_in(files)
        for part in records if run.engine == "verl" else ():
            part.completions = part.completions and _counting_updates(
                part.completions, run.settings["updates_per_batch"]
            )
        return [run, *_rollouts(files, run), *records]
    parts = [part for reader in READERS for part in reader.read(files)]
    parts += trustrl_directory.records_in(files)
    return parts if any(part.rows or part.completions for part in parts) else [*parts, *exports.read(files)]


def _rollouts(files: Files, run: Part) -> list[Part]:
    """Returns the completions that the engine of a `trustrl run` stored, with steps that count updates."""
    if run.engine == "trl":
        return trl_completions.read(files)
    if run.engine != "verl":
        return []
    parts = [part for part in verl_dumps.read(files) if part.completions is not None]
    updates = run.settings["updates_per_batch"]
    for part in parts:
        part.completions = _counting_updates(part.completions, updates)
    return parts


def _counting_updates(completions: Any, updates: int) -> Callable[[], Any]:
    return lambda: (replace(completion, step=completion.step * updates) for completion in completions())


def _nothing(path: str | Path, files: Files, parts: Sequence[Part]) -> str:
    faults = [*files.faults, *(fault for part in parts for fault in part.faults if fault not in files.faults)]
    if faults:
        return f"RUN must contain metrics, completions or token records, got {path}: {'; '.join(faults[:3])}."
    inner, above = run_folders(files), next(run_around(Path(path)), None)
    nearest = f"{inner[0]} inside it" if inner and inner[0] else above
    if nearest is not None:
        return f"RUN must be a run, got {path}, which is not one. The nearest one is {nearest}."
    known = "; ".join(f"{reader.LOOKS_FOR} ({reader.NAME})" for reader in (trustrl_directory, *READERS, exports))
    return f"RUN must be a run in a known format, got {path}. None of these was found: {known}."


def open_runs(paths: Sequence[str | Path]) -> list[tuple[str, Run]]:
    """Opens several runs. Returns each with a short label that distinguishes it from the others.

    Raises:
        ConfigError: If a path is not a run, or is given twice.
        RecordError: If a file of `trustrl run` cannot be read.
    """
    resolved = [os.path.realpath(path) for path in paths]  # Path.resolve would raise on a loop of links
    for path in paths:
        if resolved.count(os.path.realpath(path)) > 1:
            raise ConfigError(f"Each RUN must be given once, got {path} twice.")
    runs = [open_run(path) for path in paths]
    labels = short_labels([run.name for run in runs], [Path(path) for path in paths])
    return list(zip(labels, runs, strict=True))


def short_labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Returns the names without their common first and last words. Adds the folder's name if two are equal.

    Example:
        >>> short_labels(["stale-ppo-7", "stale-dppo-topk-tv-7"], [Path("a"), Path("b")])
        ['ppo', 'dppo-topk-tv']
    """
    if len(names) == 1:
        return list(names)
    words = [name.split("-") for name in names]
    while all(len(parts) > 1 and parts[0] == words[0][0] for parts in words):
        words = [parts[1:] for parts in words]
    while all(len(parts) > 1 and parts[-1] == words[0][-1] for parts in words):
        words = [parts[:-1] for parts in words]
    labels = ["-".join(parts) for parts in words]
    alike = [labels.count(label) > 1 for label in labels]
    return [
        f"{label} ({folder.name})" if two else label for label, two, folder in zip(labels, alike, folders, strict=True)
    ]


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
