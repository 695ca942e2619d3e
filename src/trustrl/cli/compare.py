"""`trustrl compare RECIPE --regions a,b,c --seeds 5 --out DIR`: trains regions × seeds and compares the results."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import add_recipe, add_regions, add_trust, regions_of
from trustrl.errors import ConfigError
from trustrl.terminal import complain, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl compare`."""
    add_recipe(parser, required=False)
    add_regions(parser, "compare")
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="Number of seeds for each region, counted up from the recipe's seed (default: 5)",
    )
    parser.add_argument("--workers", type=int, default=1, help="Number of parallel runs (default: 1)")
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="Report the first step that reaches this reward (default: 0.5)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Folder for the runs, the table, and the figures")
    add_trust(parser)
    parser.add_argument("--draw", type=Path, metavar="DIR", help="Only redraw the figures of DIR/table.json")


def run(options: argparse.Namespace) -> int:
    """Trains the missing runs, writes table.json and table.md, and prints the table. Returns 1 if a run failed."""
    if options.draw is not None:
        from trustrl.runner.figures import draw

        for file in draw(options.draw):
            say(file)
        return 0
    if options.recipe is None or options.out is None or not (options.regions or options.arms):
        raise ConfigError("A comparison must have RECIPE, --out, and --regions or --arms, or --draw alone. See --help.")
    from trustrl.files import write_json, write_whole
    from trustrl.runner.comparison import markdown, table
    from trustrl.runner.grid import command_of, prepare, run_all
    from trustrl.runner.recipe import load

    recipe = load(options.recipe, options.settings)
    cells = prepare(recipe, regions_of(options), options.seeds, options.out)
    more = ["--trust-checkpoint"] if options.trust_checkpoint else []
    failures = run_all(cells, options.workers, complain, lambda cell: [*command_of(cell), *more])
    results = table(cells, failures, options.threshold)
    write_json(options.out / "table.json", results)
    write_whole(options.out / "table.md", markdown(results))
    say(markdown(results), end="")
    return 1 if failures else 0
