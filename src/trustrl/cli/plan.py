"""`trustrl plan RECIPE`: shows what a recipe will do without loading a model."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import add_recipe
from trustrl.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl plan`."""
    add_recipe(parser)
    parser.add_argument(
        "--tokens-per-second", type=float, metavar="N",
        help="Completion tokens that one GPU samples and trains in a second, for the cost: measure whole batches",
    )  # fmt: skip
    parser.add_argument("--price", type=float, metavar="P", help="Price of a GPU hour, for the cost")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the plan on stdout."""
    from trustrl.runner.plan import plan, text
    from trustrl.runner.recipe import load

    recipe = load(options.recipe, options.settings)
    made = plan(recipe, Path("runs") / recipe.name, tokens_per_second=options.tokens_per_second, price=options.price)
    say_json(made.to_dict()) if options.json else say(text(made))
    return 0
