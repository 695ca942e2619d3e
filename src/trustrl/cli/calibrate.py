"""`trustrl calibrate RECORDS`: estimates sampler-trainer noise and recommends a threshold above it."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import add_records, check_writable, written
from trustrl.errors import ConfigError
from trustrl.terminal import complain, say, say_json

FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl calibrate`."""
    add_records(parser)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="Also draw the curves, as a .png, .svg, or .pdf")


def run(options: argparse.Namespace) -> int:
    """Prints the calibration on stdout. Returns 1 if the records have too few tokens for a recommendation."""
    from trustrl.tools.audit.audit_json import record_files
    from trustrl.tools.audit.mapreduce import count_records
    from trustrl.tools.audit.token_counts import TokenCounts
    from trustrl.tools.calibrate.calibration import calibration, draw, text
    from trustrl.tools.calibrate.noise_counts import COLUMNS, noise_of

    if options.figure is not None:
        if options.figure.suffix not in FORMATS:
            raise ConfigError(f"--figure must end with {', '.join(FORMATS)}, got {str(options.figure)!r}.")
        check_writable("--figure", options.figure)
    files = record_files(options.records)
    where = "ray" if options.ray else "processes"
    counts = count_records(files, noise_of, kind=TokenCounts, columns=COLUMNS, workers=options.workers, where=where)
    report = calibration(counts)
    say_json(report) if options.json else say(text(report))
    if options.figure is not None:
        with written("--figure", options.figure):
            draw(counts, report, options.figure)
        complain(options.figure)
    return 0 if report["noise"] >= report["needed"] else 1
