"""`run`: a recipe in a folder of its own, on the engine it names."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trustrl.config.loading import config_to_dict
from trustrl.runner.directory import RunDirectory
from trustrl.runner.plan import plan
from trustrl.runner.processes import is_main_process
from trustrl.runner.progress import Progress
from trustrl.runner.recipe import Recipe
from trustrl.runner.summary import summary
from trustrl.runner.trust import only_the_owner_writes

Engine = Callable[[Recipe, RunDirectory, Progress], None]
"""Trains in the folder, from its last checkpoint if there is one, and appends metrics and evaluations to it."""

ENGINES = {"trl": "trustrl.runner.trl_run", "verl": "trustrl.runner.verl_run"}


def run(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    trust_checkpoint: bool = False,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Runs a recipe, or goes on with it.

    Args:
        recipe: What to run.
        folder: The run's own; made if it is not there.
        resume: Goes on from the last checkpoint where a run is there; a finished one is left as it is.
        trust_checkpoint: Loads a checkpoint that other users own or can write to. Loading one can execute code.
        engine: Another engine than the one the recipe names.

    Returns:
        What `result.json` holds; nothing on ranks other than the first, which write no files.

    Raises:
        ConfigError: the folder holds another run or is in use, others can write to its checkpoint, or the recipe asks
            for what its engine cannot do.
        EngineError: the engine failed, or none of the run's checkpoints is whole.
        MissingPackageError: the engine or the sampler is not installed.
    """
    directory = RunDirectory(folder, trust_checkpoint)
    if resume and directory.finished:
        return directory.result()
    plan(recipe, folder)  # what cannot work is refused before anything is written or loaded
    train = engine or _engine(recipe)
    progress, began = Progress(recipe.name, recipe.schedule.steps), time.time()
    if not is_main_process():
        with only_the_owner_writes():
            train(recipe, directory, progress)
        return {}
    with only_the_owner_writes(), directory.held():
        directory.begin(recipe, resume=resume)
        train(recipe, directory, progress)
        directory.finish(_result(recipe, directory, time.time() - began))
    return directory.result()


def _engine(recipe: Recipe) -> Engine:
    """The engine a recipe names, once its packages are known to be there."""
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
