"""`trustrl run RECIPE`: trains a recipe in a run directory and draws its curves."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import add_recipe, add_trust
from trustrl.errors import MissingPackageError
from trustrl.terminal import complain, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl run`."""
    add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="Run directory (default: runs/<recipe name>)")
    parser.add_argument("--resume", action="store_true", help="Resume from the last checkpoint, if one exists")
    parser.add_argument(
        "--rehearse", action="store_true",
        help="Train a tiny model of the same architecture on this CPU for two batches, with the same keys and code",
    )  # fmt: skip
    add_trust(parser)
    parser.add_argument(
        "--accept-loss", action="store_true",
        help="Resume although metrics, evaluations or records before the checkpoint are lost. result.json names them",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Trains the recipe and prints the result as JSON on stdout."""
    from trustrl.runner.recipe import load
    from trustrl.runner.run_recipe import run as run_recipe

    recipe = load(options.recipe, options.settings)
    if options.rehearse:
        from trustrl.runner.rehearsal import rehearsed, vllm_is_here

        recipe, changes = rehearsed(recipe, vllm=vllm_is_here(recipe.engine.name))
        complain("\n".join(["A rehearsal: of the recipe, it changes what follows.", *changes]))
    folder = options.out or Path("runs") / recipe.name
    complain(f"{recipe.name}: training in {folder}")
    result = run_recipe(
        recipe, folder, resume=options.resume, trust_checkpoint=options.trust_checkpoint,
        accept_loss=options.accept_loss,
    )  # fmt: skip
    if result:  # only rank 0 has a result
        say_json(result)
        complain(_drawn(folder, recipe.schedule.updates_per_batch))
    return 0


def _drawn(folder: Path, updates_per_batch: int) -> str:
    """Draws the curves of the run and returns a log line. A missing plotting package is not an error."""
    from trustrl.runner.figures import draw_run
    from trustrl.runs.run_directory import StoredRun

    try:
        return f"figure written to {draw_run(StoredRun(folder), updates_per_batch)}"
    except MissingPackageError as error:
        return f"figure not drawn: {error}"
