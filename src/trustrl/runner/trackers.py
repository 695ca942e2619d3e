"""Trackers of a recipe: the packages they need, and environment variables that keep their files in the run directory.

Both engines log to trackers themselves. Nothing leaves this machine unless a variable of the user sends it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.optional_imports import require
from trustrl.runner.recipe import Recipe

PROJECT = "trustrl"
"""Project or experiment that trackers file the run under."""


def environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Returns the variables for the recipe's tracker. Variables that the user has set take precedence."""
    match recipe.logging.tracker:
        case "tensorboard":
            # The first is read by transformers, the second by verl.
            return dict.fromkeys(("TENSORBOARD_LOGGING_DIR", "TENSORBOARD_DIR"), str(folder / "tensorboard"))
        case "wandb":
            return {
                "WANDB_MODE": "offline",
                "WANDB_ERROR_REPORTING": "false",
                "WANDB_DIR": str(folder),
                "WANDB_PROJECT": PROJECT,
            }
        case "trackio":
            return {"TRACKIO_DIR": str(folder / "trackio")}
        case "mlflow":
            return {
                "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
                "MLFLOW_EXPERIMENT_NAME": PROJECT,
                "MLFLOW_DISABLE_TELEMETRY": "true",
            }
        case _:
            return {}


def require_package(recipe: Recipe) -> None:
    """Raises if the package of the recipe's tracker is not installed, without importing it.

    Raises:
        MissingPackageError: If it is not installed.
    """
    tracker = recipe.logging.tracker
    if tracker is not None:
        require(tracker, advice=f"Run `pip install {tracker}`, or leave out logging.tracker.")
    if tracker == "mlflow" and "MLFLOW_TRACKING_URI" not in os.environ:
        require("sqlalchemy", advice="Run `pip install mlflow`: mlflow-skinny does not bring it.")


def refuse_two(recipe: Recipe, key: str, settings: Mapping[str, Any]) -> None:
    """Raises if the recipe names a tracker and `engine.settings` set the engine's own key for trackers."""
    if recipe.logging.tracker is not None and key in settings:
        raise ConfigError(
            f"engine.settings must leave out {key} if logging.tracker is {recipe.logging.tracker!r}, got "
            f"{settings[key]!r}. Remove one of them."
        )


@contextlib.contextmanager
def tracked(recipe: Recipe, folder: Path) -> Iterator[None]:
    """Sets the tracker's variables for training in this process, and completes its files at the end.

    Trackers print to stdout, which is for data, so their output goes to stderr. Trackio reads its directory when it is
    imported: a second run in the same process writes to the directory of the first.
    """
    tracker = recipe.logging.tracker
    if tracker is None:
        yield
        return
    before = dict(os.environ)
    os.environ.update(environment(recipe, folder) | before)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
            if tracker == "wandb":
                import_module("wandb").finish()  # transformers leaves the run open
    finally:
        for name in [name for name in os.environ if name.startswith(f"{tracker.upper()}_") and name not in before]:
            del os.environ[name]  # trackers set variables, too
