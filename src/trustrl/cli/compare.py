"""`trustrl compare RECIPE --regions a,b,c --seeds 5 --out DIR`: which region does better, and how sure that is."""

import argparse
import sys
from pathlib import Path

from trustrl.cli.recipes import add_recipe
from trustrl.cli.regions import add_regions, regions_of
from trustrl.cli.run import add_trust
from trustrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    add_recipe(parser, required=False)
    add_regions(parser, "compare")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, from the recipe's seed on (5)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--threshold", type=float, default=0.5, help="reward whose first step is reported (0.5)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where runs, table and pictures go")
    add_trust(parser)
    parser.add_argument("--draw", type=Path, metavar="DIR", help="only draws DIR's table.json again")


def run(options: argparse.Namespace) -> int:
    """Runs what is missing, writes table.json and table.md, prints the table; 1 where a run failed."""
    if options.draw is not None:
        return _draw(options.draw)
    if options.recipe is None or options.out is None or not (options.regions or options.arms):
        raise ConfigError("A comparison must have RECIPE, --regions or --arms, and --out, or --draw alone. See --help.")
    from trustrl.runner.comparison import markdown, table
    from trustrl.runner.directory import write_json, write_whole
    from trustrl.runner.grid import command_of, prepare, run_all
    from trustrl.runner.recipe import load

    recipe = load(options.recipe, options.settings)
    cells = prepare(recipe, regions_of(options), options.seeds, options.out)
    more = ["--trust-checkpoint"] if options.trust_checkpoint else []
    failures = run_all(
        cells, options.workers, lambda line: print(line, file=sys.stderr, flush=True),
        lambda cell: [*command_of(cell), *more],
    )  # fmt: skip
    found = table(cells, failures, options.threshold)
    write_json(options.out / "table.json", found)
    write_whole(options.out / "table.md", markdown(found))
    print(markdown(found), end="")
    return 1 if failures else 0


def _draw(folder: Path) -> int:
    from trustrl.runner.figures import draw

    for file in draw(folder):
        print(file)
    return 0
