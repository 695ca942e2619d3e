"""The arguments every verb that takes a recipe has."""

import argparse


def add_recipe(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """RECIPE and settings."""
    parser.add_argument("recipe", metavar="RECIPE", nargs=None if required else "?", help="a TOML file")
    parser.add_argument(
        "settings",
        metavar="table.key=value",
        nargs="*",
        help="replaces a setting, as in schedule.steps=50 or region.divergence.max_increase=0.2",
    )
