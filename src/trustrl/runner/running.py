"""`run`: a recipe in a folder of its own, on the engine it names."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trustrl.config.loading import config_to_dict
from trustrl.runner.directory import RunDirectory
from trustrl.runner.plan import plan
from trustrl.runner.progress import Progress
from trustrl.runner.recipe import Recipe
from trustrl.runner.summary import summary

Engine = Callable[[Recipe, RunDirectory, Progress], None]
"""Trains in the folder, from its last checkpoint if there is one, and appends metrics and evaluations to it."""

ENGINES = {"trl": "trustrl.runner.trl_run", "verl": "trustrl.runner.verl_run"}


def run(recipe: Recipe, folder: Path, *, resume: bool = False, engine: Engine | None = None) -> dict[str, Any]:
    """Runs a recipe, or goes on with it.

    Args:
        recipe: What to run.
        folder: The run's own; made if it is not there.
        resume: Goes on from the last checkpoint where a run is there; a finished one is left as it is.
        engine: Another engine than the one the recipe names.

    Returns:
        What `result.json` holds.

    Raises:
        ConfigError: the folder holds another run, or the recipe asks for what its engine cannot do.
        EngineError: the engine failed.
    """
    directory = RunDirectory(folder)
    if resume and directory.finished:
        return directory.result()
    plan(recipe, folder)  # what cannot work is refused before anything is written or loaded
    directory.begin(recipe, resume=resume)
    train = engine or import_module(ENGINES[recipe.engine.name]).train
    began = time.time()
    train(recipe, directory, Progress(recipe.name, recipe.schedule.steps))
    result = {
        "name": recipe.name,
        "engine": recipe.engine.name,
        "region": config_to_dict(recipe.region),
        "seed": recipe.schedule.seed,
        **summary(directory.rows(), directory.rows("evaluation")),
        "seconds": round(time.time() - began, 1),
    }
    directory.finish(result)
    return directory.result()
