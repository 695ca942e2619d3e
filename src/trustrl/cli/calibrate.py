"""`trustrl calibrate RECORDS`: how much noise lies between sampler and trainer, and which threshold leaves it alone."""

import argparse
import json
import sys
from pathlib import Path

from trustrl.cli.audit import add_records
from trustrl.cli.outputs import check_writable, written
from trustrl.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    add_records(parser)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draws the curves too: a .png, .svg or .pdf")


def run(options: argparse.Namespace) -> int:
    """Prints the calibration on stdout; 1 where the tokens are too few for a recommendation."""
    from trustrl.audit.calibration import calibration
    from trustrl.audit.calibration_text import draw, text
    from trustrl.audit.mapreduce import summarised
    from trustrl.audit.noise import COLUMNS, noise_of
    from trustrl.audit.report import record_files

    if options.figure is not None:
        if options.figure.suffix not in FORMATS:
            raise ConfigError(f"--figure must end with {', '.join(FORMATS)}, got {str(options.figure)!r}.")
        check_writable("--figure", options.figure)
    files = record_files(options.records)
    where = "ray" if options.ray else "processes"
    summary = summarised(files, noise_of, columns=COLUMNS, workers=options.workers, where=where)
    found = calibration(summary)
    print(json.dumps(found, indent=1) if options.json else text(found))
    if options.figure is not None:
        with written("--figure", options.figure):
            draw(summary, found, options.figure)
        print(options.figure, file=sys.stderr)
    return 0 if found["noise"] >= found["needed"] else 1
