"""`compare`: regions × seeds, each run in a process and a folder of its own.

Finished runs are skipped, half-finished ones go on from their last checkpoint, failed ones are reported and counted.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trustrl.config import checks
from trustrl.config.axes import Region
from trustrl.config.presets import preset
from trustrl.errors import ConfigError
from trustrl.runner.directory import RunDirectory, differences, write_json, write_whole
from trustrl.runner.plan import plan
from trustrl.runner.processes import ends_with_its_parent
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.recipe_tables import folder_name

SECONDS_BETWEEN_LOOKS = 0.2
LAST_WORDS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    region: str
    seed: int
    folder: Path
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an error, and its last words."""

    region: str
    seed: int
    code: int
    said: str


def chosen(names: Sequence[str], arms: Mapping[str, Region]) -> dict[str, Region]:
    """The regions to compare, by name: arms and presets that are named, or every arm where nothing is.

    Raises:
        ConfigError: nothing is chosen, or one is named twice.
        UnknownNameError: a name is neither an arm nor a preset.
    """
    if len(set(names)) != len(names) or not (names or arms):
        raise ConfigError(f"--regions must name presets or arms, each once, got {', '.join(names) or 'none'}.")
    return {name: arms[name] if name in arms else preset(name) for name in names or arms}


def cells(recipe: Recipe, regions: Mapping[str, Region], seeds: int, out: Path) -> list[Cell]:
    """Every run, seed by seed, so that an interrupted comparison has as many of each region.

    Raises:
        ConfigError: a region does not go with the recipe.
    """
    checks.whole("--seeds", seeds, low=1)
    for name in regions:
        folder_name("A region's name", name)
    found = []
    for seed in range(recipe.schedule.seed, recipe.schedule.seed + seeds):
        for name, region in regions.items():
            one = replace(
                recipe,
                name=f"{recipe.name}-{name}-{seed}",
                region=region,
                schedule=replace(recipe.schedule, seed=seed),
            )
            plan(one)
            found.append(Cell(name, seed, out / name / f"seed-{seed}", one))
    return found


def prepare(recipe: Recipe, regions: Mapping[str, Region], seeds: int, out: Path) -> list[Cell]:
    """Writes what is compared into the folder, or finds the same comparison there.

    Raises:
        ConfigError: the folder holds runs of another recipe.
    """
    found = cells(recipe, regions, seeds, out)
    for cell in found:
        file = cell.folder.with_suffix(".toml")
        if file.exists():
            changed = differences(load(file).to_dict(), cell.recipe.to_dict())
            if changed:
                raise ConfigError(
                    f"The folder must hold runs of this recipe, got {out}: {', '.join(changed)} changed. Choose "
                    "another --out."
                )
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, cell.recipe.to_toml())
    write_json(out / "grid.json", {"name": recipe.name, "regions": list(regions), "seeds": seeds})
    return found


def command_of(cell: Cell) -> list[str]:
    """The run in a process of its own."""
    recipe = str(cell.folder.with_suffix(".toml"))
    return [sys.executable, "-m", "trustrl.cli", "run", recipe, "--out", str(cell.folder), "--resume"]


def run_all(
    todo: Sequence[Cell],
    workers: int,
    say: Callable[[str], None],
    command: Callable[[Cell], list[str]] = command_of,
) -> list[Failure]:
    """Runs what is not finished, at most `workers` at a time, and returns what failed.

    Args:
        todo: The grid.
        workers: Processes at a time.
        say: Takes one line for people at a time.
        command: How a run is started.
    """
    checks.whole("--workers", workers, low=1)
    waiting = [cell for cell in todo if not RunDirectory(cell.folder).finished]
    say(f"{len(todo)} runs, {len(todo) - len(waiting)} of them finished already")
    failures: list[Failure] = []
    running: list[tuple[Cell, subprocess.Popen[bytes]]] = []
    try:
        for cell in waiting:
            while len(running) >= workers:
                failures += _ended(running, say)
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
            with cell.folder.with_suffix(".log").open("ab") as log:
                running.append(
                    (cell, subprocess.Popen(command(cell), stdout=log, stderr=log, preexec_fn=ends_with_its_parent))
                )
        while running:
            failures += _ended(running, say)
    finally:
        for _, process in running:  # interrupted: a half-finished run can be resumed
            process.terminate()
            process.wait()
    return failures


def _ended(running: list[tuple[Cell, "subprocess.Popen[bytes]"]], say: Callable[[str], None]) -> Iterator[Failure]:
    """Waits until a run has ended; takes every ended one off the list."""
    while all(process.poll() is None for _, process in running):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    for cell, process in [one for one in running if one[1].poll() is not None]:
        running.remove((cell, process))
        directory = RunDirectory(cell.folder)
        if process.returncode == 0 and directory.finished:
            result = directory.result()
            before, after = (f"{result[f'accuracy_{when}'] or 0:.3f}" for when in ("before", "after"))
            say(f"{cell.region}, seed {cell.seed}: held-out accuracy {before} → {after}")
            continue
        log = cell.folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace").splitlines()
        say(f"{cell.region}, seed {cell.seed}: failed with code {process.returncode}")
        yield Failure(cell.region, cell.seed, process.returncode, "\n".join(log[-LAST_WORDS:]))
