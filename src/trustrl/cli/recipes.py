"""`trustrl recipes [NAME]`: the recipes that come with trustrl, or the text of one, to start your own from."""

import argparse
import json
from typing import Any


def add_recipe(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """RECIPE and settings: the arguments of every verb that takes a recipe."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs=None if required else "?",
        help="a TOML file, or a name that `trustrl recipes` lists",
    )
    parser.add_argument(
        "settings",
        metavar="table.key=value",
        nargs="*",
        default=[],
        help="replaces a setting, as in schedule.steps=50 or region.divergence.max_increase=0.2",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="prints this one's TOML; all are listed where left out")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints one recipe's file, or a line for each."""
    from trustrl.runner.recipe import load
    from trustrl.runner.shipped import about, named, shipped

    if options.name is not None:
        file = named(options.name)
        print(_json(load(file).to_dict()) if options.json else file.read_text(encoding="utf-8").rstrip())
        return 0
    told = {name: about(file) for name, file in shipped().items()}
    width = max(map(len, told), default=0)
    print(_json(told) if options.json else "\n".join(f"{name:<{width}}  {what}" for name, what in told.items()))
    return 0


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False)
