"""`trustrl calibrate RECORDS`: estimates sampler-trainer noise and recommends a threshold above it."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import add_anchor, add_records, check_picture, check_writable, written
from trustrl.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl calibrate`."""
    add_records(parser)
    add_anchor(parser)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="Also draw the curves, as a .png, .svg, or .pdf")


def run(options: argparse.Namespace) -> int:
    """Prints the calibration on stdout. Returns 1 if the records have too few tokens for a recommendation."""
    from functools import partial

    from trustrl.tools.audit import anchor_in
    from trustrl.tools.audit.audit_json import record_files
    from trustrl.tools.audit.mapreduce import count_records
    from trustrl.tools.audit.token_counts import TokenCounts
    from trustrl.tools.calibrate.calibration import calibration, draw, text
    from trustrl.tools.calibrate.noise_counts import COLUMNS, noise_of

    if options.figure is not None:
        check_picture("--figure", options.figure)
        check_writable("--figure", options.figure)
    files = record_files(options.records)
    where = "ray" if options.ray else "processes"
    anchor = anchor_in(files, options.anchor)
    of = partial(noise_of, anchor=anchor)
    counts = count_records(files, of, kind=TokenCounts, columns=COLUMNS, workers=options.workers, where=where)
    report = calibration(counts, anchor)
    say_json(report) if options.json else say(text(report))
    if options.figure is not None:
        with written("--figure", options.figure):
            draw(counts, report, options.figure)
        complain(options.figure)
    return 0 if report["noise"] >= report["needed"] else 1
