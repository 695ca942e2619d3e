"""`trustrl run RECIPE`: trains a recipe in a folder of its own, and draws it."""

import argparse
import json
import sys
from pathlib import Path

from trustrl.cli.recipes import add_recipe
from trustrl.errors import MissingPackageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (runs/<name of the recipe>)")
    parser.add_argument("--resume", action="store_true", help="goes on from the last checkpoint, if there is one")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds --trust-checkpoint, for every verb that resumes runs."""
    parser.add_argument(
        "--trust-checkpoint", action="store_true",
        help="Load a checkpoint that other users own or can write to. Loading one can execute code",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Trains; prints the result as JSON on stdout."""
    from trustrl.runner.recipe import load
    from trustrl.runner.running import run as run_recipe

    recipe = load(options.recipe, options.settings)
    folder = options.out or Path("runs") / recipe.name
    print(f"{recipe.name}: in {folder}", file=sys.stderr, flush=True)
    result = run_recipe(recipe, folder, resume=options.resume, trust_checkpoint=options.trust_checkpoint)
    if result:  # on other ranks there is none
        print(json.dumps(result, indent=1))
        print(_drawn(folder, recipe.schedule.updates_per_batch), file=sys.stderr)
    return 0


def _drawn(folder: Path, updates_per_batch: int) -> str:
    """Draws the run if that can be done; it has ended well either way."""
    from trustrl.runner.directory import RunDirectory
    from trustrl.runner.figures import draw_run

    try:
        return f"drawn: {draw_run(RunDirectory(folder), updates_per_batch)}"
    except MissingPackageError as error:
        return f"not drawn: {error}"
