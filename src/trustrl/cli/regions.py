"""The arguments every verb that takes several regions has."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trustrl.config.axes import Region
from trustrl.errors import ConfigError


def add_regions(parser: argparse.ArgumentParser, what: str) -> None:
    """--regions and --arms."""
    parser.add_argument("--regions", metavar="a,b,c", help=f"presets or arms to {what} (every arm)")
    parser.add_argument("--arms", type=Path, metavar="FILE", help="more regions: a TOML file with one table each")


def regions_of(options: argparse.Namespace, otherwise: Sequence[str] = ()) -> dict[str, Region]:
    """The regions that were asked for, by name; `otherwise` where none was.

    Raises:
        ConfigError: the file of arms does not fit, nothing is chosen, or one is named twice.
        UnknownNameError: a name is neither an arm nor a preset.
    """
    from trustrl.runner.grid import chosen
    from trustrl.runner.recipe import load_arms

    arms = load_arms(options.arms) if options.arms else {}
    if options.arms and not arms:
        raise ConfigError(f"--arms must have a table for each region, got none in {options.arms}.")
    names = [name.strip() for name in (options.regions or "").split(",") if name.strip()]
    if options.regions is not None and not names:
        raise ConfigError(f"--regions must name presets or arms, got {options.regions!r}.")
    return chosen(names or ([] if arms else otherwise), arms)
