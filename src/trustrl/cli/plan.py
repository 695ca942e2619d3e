"""`trustrl plan RECIPE`: shows what a recipe will do without loading a model."""

import argparse
import json
from pathlib import Path

from trustrl.cli.shared_options import add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl plan`."""
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the plan on stdout."""
    from trustrl.runner.plan import plan, text
    from trustrl.runner.recipe import load

    recipe = load(options.recipe, options.settings)
    made = plan(recipe, Path("runs") / recipe.name)
    print(json.dumps(made.to_dict(), indent=1, default=str) if options.json else text(made))
    return 0
