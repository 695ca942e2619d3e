"""`trustrl recipes [NAME]`: lists the shipped recipes, or prints one."""

import argparse

from trustrl.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl recipes`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="Print the TOML of this recipe (default: list all)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the file of one recipe, or one line per recipe."""
    from trustrl.runner.recipe import load
    from trustrl.runner.recipe_files import about, named, shipped

    if options.name is not None:
        file = named(options.name)
        say_json(load(file).to_dict()) if options.json else say(file.read_text(encoding="utf-8").rstrip())
        return 0
    told = {name: about(file) for name, file in shipped().items()}
    width = max(map(len, told), default=0)
    say_json(told) if options.json else say("\n".join(f"{name:<{width}}  {what}" for name, what in told.items()))
    return 0
