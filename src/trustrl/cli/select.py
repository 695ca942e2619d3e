"""`trustrl select RECIPE --out DIR`: keeps the problems of the data that the model solves sometimes, but not always."""

import argparse
import re
from pathlib import Path

from trustrl.cli.shared_options import add_recipe
from trustrl.errors import ConfigError
from trustrl.terminal import complain, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl select`."""
    add_recipe(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="Folder for the counts and the selection"
    )
    parser.add_argument("--answers", type=int, default=40, help="Number of answers to each problem (default: 40)")
    parser.add_argument("--lowest", type=float, default=0.2, help="Smallest share of right answers (default: 0.2)")
    parser.add_argument("--highest", type=float, default=0.8, help="Largest share of right answers (default: 0.8)")
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="Answer only the i-th of n parts (default: 1/1)")
    parser.add_argument("--batch", type=int, default=64, help="Problems that are answered together (default: 64)")


def run(options: argparse.Namespace) -> int:
    """Answers the problems, and prints numbers and files as JSON on stdout."""
    parts = re.fullmatch(r"(\d{1,9})/(\d{1,9})", options.shard)
    if parts is None:
        raise ConfigError(f"--shard must have the form i/n, got {options.shard!r}.")
    from trustrl.runner.recipe import load
    from trustrl.runner.selection import Selection, select

    rule = Selection(
        answers=options.answers, lowest=options.lowest, highest=options.highest, batch=options.batch,
        shard=(int(parts[1]), int(parts[2])),
    )  # fmt: skip
    result = select(load(options.recipe, options.settings), options.out, rule)
    say_json(result)
    if result["counted"] < result["problems"]:
        complain(f"{result['problems'] - result['counted']} problems have no count yet: run the other shards.")
    return 0
