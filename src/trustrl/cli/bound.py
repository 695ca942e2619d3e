"""`trustrl bound RECORDS`: evaluates DPPO's improvement bound on recorded tokens, update by update."""

import argparse

from trustrl.cli.shared_options import add_anchor, add_records
from trustrl.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl bound`."""
    add_records(parser, nargs=None)
    add_anchor(parser)
    parser.add_argument("--delta", type=float, help="TV up to which a token is inside (default: the recorded region's)")
    parser.add_argument("--horizon", type=int, metavar="T", help="Largest number of tokens of a completion")
    parser.add_argument(
        "--rewards", type=float, nargs=2, metavar=("LOW", "HIGH"),
        help="Range of the reward function (default: that of the recorded rewards)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Prints the bound of every update on stdout."""
    from functools import partial

    from trustrl.config import validators
    from trustrl.recording import read_run
    from trustrl.tools.audit import anchor_in, count_records, record_files, recorded_regions
    from trustrl.tools.bound.bound_report import bound_report, read_rewards, record_folder, text, threshold
    from trustrl.tools.bound.update_sums import COLUMNS, UpdateSums, sums_of

    if options.delta is not None:
        validators.real("--delta", options.delta, rule="a TV in (0, 1]", low=0.0, high=1.0)
    if options.horizon is not None:
        validators.whole("--horizon", options.horizon, low=1)
    files = record_files([options.records])
    folder = record_folder(options.records)
    sequences = read_rewards(folder)
    ball = threshold(options.delta, recorded_regions(files))
    anchor = anchor_in(files, options.anchor)
    of = partial(sums_of, rewards=sequences.rewards, delta=ball.tv, anchor=anchor)
    where = "ray" if options.ray else "processes"
    sums = count_records(files, of, kind=UpdateSums, columns=COLUMNS, workers=options.workers, where=where)
    about = read_run(folder) or {}
    report = bound_report(
        sums, sequences, ball, horizon=options.horizon, reward_range=options.rewards, sampling=about.get("sampling"),
        anchor=anchor,
    )  # fmt: skip
    say_json(report) if options.json else say(text(report))
    return 0
