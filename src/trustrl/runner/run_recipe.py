"""Runs a recipe in a run directory, on the engine it names."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from trustrl.errors import EngineError
from trustrl.optional_imports import require
from trustrl.regions.loading import config_to_dict
from trustrl.runner.checkpoints import only_the_owner_writes
from trustrl.runner.directory import RunDirectory
from trustrl.runner.plan import plan
from trustrl.runner.processes import Progress, is_main_process
from trustrl.runner.recipe import Recipe
from trustrl.runs.run_verdict import summary
from trustrl.world import tasks

Engine = Callable[[Recipe, RunDirectory, Progress], None]
"""Trains in the directory, from its last checkpoint if any, and appends metrics and evaluations to it."""

ROOM = 1 << 20
"""Bytes that a disk must have left. With less, an engine's error is reported as a full disk."""

ENGINES = {"trl": "trustrl.runner.trl_run", "verl": "trustrl.runner.verl_run"}


def run(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    trust_checkpoint: bool = False,
    accept_loss: bool = False,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Runs a recipe in a new run directory, or resumes it.

    Args:
        recipe: The recipe to run.
        folder: The run directory. Created if missing.
        resume: Resumes from the last checkpoint if the directory contains a run. A finished run is left unchanged.
        trust_checkpoint: Loads a checkpoint that others wrote, own or can write to. Loading one can execute code.
        accept_loss: Resumes although rows or record files before the checkpoint are lost. result.json names them.
        engine: Replaces the engine that the recipe names.

    Returns:
        The content of `result.json`. Empty on ranks other than the first, which write no files.

    Raises:
        ConfigError: If the directory contains another run or is in use, if others wrote its checkpoint or can write to
            it, if there is no key to sign checkpoints with, or if the engine cannot execute the recipe.
        EngineError: If the engine failed, the disk is full, all checkpoints of the run are damaged, or the run has lost
            files before all of them.
        MissingPackageError: If the engine, the sampler or tomli-w is not installed.
    """
    directory = RunDirectory(folder, trust_checkpoint, accept_loss)
    if resume and directory.finished:
        return directory.result()
    plan(recipe, folder)  # raises before anything is written or loaded
    train = engine or _engine(recipe)
    began = time.monotonic()
    with only_the_owner_writes(), Progress(recipe.name, recipe.schedule.steps) as progress:
        if not is_main_process():
            train(recipe, directory, progress)
            return {}
        require("tomli_w", advice='Run `pip install "trustrl[run]"`.')  # for recipe.toml
        tasks.load(recipe.task.name, **recipe.task.settings).start()
        with directory.held(), _full_disk_named(folder):
            directory.begin(recipe, resume=resume, log=progress.log)
            train(recipe, directory, progress)
            directory.finish(_result(recipe, directory, time.monotonic() - began))
    return directory.result()


@contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Raises an error that names a full disk. torch reports one only as an unexpected position in a file."""
    try:
        yield
    except Exception as error:
        named = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
        if not named and shutil.disk_usage(folder).free >= ROOM:
            raise
        raise EngineError(
            f"The disk must have room for the run, got a full one at {folder} ({str(error).rstrip('.')}). Free some "
            "space, then run the same command with --resume to continue from the last checkpoint."
        ) from error


def _engine(recipe: Recipe) -> Engine:
    """Returns the engine that a recipe names, after checking that its packages are installed."""
    module = import_module(ENGINES[recipe.engine.name])
    module.require_packages(recipe)
    return module.train


def _result(recipe: Recipe, directory: RunDirectory, seconds: float) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "engine": recipe.engine.name,
        "region": config_to_dict(recipe.region),
        "seed": recipe.schedule.seed,
        **summary(directory.rows(), directory.rows("evaluation"), recipe.schedule.updates_per_batch),
        "seconds": round(seconds, 1),
    }
