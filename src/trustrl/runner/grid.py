"""Grid of runs for `trustrl compare`: regions × seeds, each run in a separate process and directory.

Skips finished runs, resumes unfinished ones from their last checkpoint, and reports and counts failed ones.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trustrl.config import validators
from trustrl.config.axes import Region
from trustrl.errors import ConfigError
from trustrl.files import last_lines, write_json, write_whole
from trustrl.regions.presets import preset
from trustrl.runner.directory import differences
from trustrl.runner.plan import plan
from trustrl.runner.processes import ends_with_its_parent
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.recipe_tables import folder_name
from trustrl.runs.run_directory import LAST_WORDS, StoredRun

POLLING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    region: str
    seed: int
    folder: Path
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an error, and the end of its log."""

    region: str
    seed: int
    code: int
    said: str


def chosen(names: Sequence[str], arms: Mapping[str, Region]) -> dict[str, Region]:
    """Returns the regions to compare, by name: the named arms and presets, or every arm if `names` is empty.

    Raises:
        ConfigError: If no region is chosen, or one is named twice.
        UnknownNameError: If a name is neither an arm nor a preset.
    """
    if len(set(names)) != len(names) or not (names or arms):
        raise ConfigError(f"--regions must name presets or arms, each once, got {', '.join(names) or 'none'}.")
    return {name: arms[name] if name in arms else preset(name) for name in names or arms}


def cells(recipe: Recipe, regions: Mapping[str, Region], seeds: int, out: Path) -> list[Cell]:
    """Returns all runs, seed by seed, so that an interrupted comparison has equally many runs of each region.

    Raises:
        ConfigError: If a region does not fit the recipe.
    """
    validators.whole("--seeds", seeds, low=1)
    for name in regions:
        folder_name("A region's name", name)
    grid = []
    for seed in range(recipe.schedule.seed, recipe.schedule.seed + seeds):
        for name, region in regions.items():
            cell_recipe = replace(
                recipe,
                name=f"{recipe.name}-{name}-{seed}",
                region=region,
                schedule=replace(recipe.schedule, seed=seed),
            )
            plan(cell_recipe)
            grid.append(Cell(name, seed, out / name / f"seed-{seed}", cell_recipe))
    return grid


def prepare(recipe: Recipe, regions: Mapping[str, Region], seeds: int, out: Path) -> list[Cell]:
    """Writes the recipes of the comparison into the directory, or checks that the same ones are there.

    Raises:
        ConfigError: If the directory contains runs of another recipe.
        MissingPackageError: If tomli-w is not installed.
    """
    grid = cells(recipe, regions, seeds, out)
    for cell in grid:
        file = cell.folder.with_suffix(".toml")
        if file.exists():
            changed = differences(load(file).to_dict(), cell.recipe.to_dict())
            if changed:
                raise ConfigError(
                    f"The directory must contain runs of this recipe, got {out}, where {', '.join(changed)} changed. "
                    "Choose another --out."
                )
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, cell.recipe.to_toml())
    write_json(out / "grid.json", {"name": recipe.name, "regions": list(regions), "seeds": seeds})
    return grid


def command_of(cell: Cell) -> list[str]:
    """Returns the command of a run."""
    recipe = str(cell.folder.with_suffix(".toml"))
    return [sys.executable, "-m", "trustrl.cli", "run", recipe, "--out", str(cell.folder), "--resume"]


def run_all(
    todo: Sequence[Cell],
    workers: int,
    report: Callable[[str], None],
    command: Callable[[Cell], list[str]] = command_of,
) -> list[Failure]:
    """Executes the unfinished runs, at most `workers` at a time, and returns the failures."""
    validators.whole("--workers", workers, low=1)
    waiting = [cell for cell in todo if not StoredRun(cell.folder).finished]
    report(f"{len(todo)} runs, {len(todo) - len(waiting)} of them already finished")
    failures: list[Failure] = []
    running: list[tuple[Cell, subprocess.Popen[bytes]]] = []
    try:
        for cell in waiting:
            while len(running) >= workers:
                failures += _ended(running, report)
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
            with cell.folder.with_suffix(".log").open("ab") as log:
                running.append(
                    (cell, subprocess.Popen(command(cell), stdout=log, stderr=log, preexec_fn=ends_with_its_parent))
                )
        while running:
            failures += _ended(running, report)
    finally:
        for _, process in running:  # after an interrupt; unfinished runs can be resumed
            process.terminate()
            process.wait()
    return failures


def _ended(running: list[tuple[Cell, "subprocess.Popen[bytes]"]], report: Callable[[str], None]) -> Iterator[Failure]:
    """Waits until a run has ended, removes every ended run from the list, and yields the failures."""
    while all(process.poll() is None for _, process in running):
        time.sleep(POLLING_SECONDS)
    for cell, process in [pair for pair in running if pair[1].poll() is not None]:
        running.remove((cell, process))
        run = StoredRun(cell.folder)
        if process.returncode == 0 and run.finished:
            result = run.result()
            before, after = (f"{result[f'accuracy_{when}'] or 0:.3f}" for when in ("before", "after"))
            report(f"{cell.region}, seed {cell.seed}: held-out accuracy {before} → {after}")
            continue
        said = "\n".join(last_lines(cell.folder.with_suffix(".log"), LAST_WORDS))
        report(f"{cell.region}, seed {cell.seed}: failed with code {process.returncode}")
        yield Failure(cell.region, cell.seed, process.returncode, said)
