"""`trustrl report RUN...`: summarizes runs in the terminal or as one self-contained HTML page."""

import argparse
import sys
from pathlib import Path

from trustrl.cli.shared_options import prepare_file, written
from trustrl.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl report`."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="Run of any trainer: a run directory of `trustrl run`, TRL's output_dir, verl's logs, a tracker's files",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="Write the HTML page and print its path")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the summary or writes the page. Returns 1 if the records of a run cannot be read."""
    from trustrl.runs.open_run import open_runs
    from trustrl.tools.report.report_contents import gather, summary_of, text

    runs = open_runs(options.runs)
    if options.out is not None:
        prepare_file("--out", options.out)
    report = gather(runs) if options.out is not None else gather(runs, max_points=0, max_shown=0)
    for (_, opened_run), note in zip(runs, report.notes, strict=True):
        if note:
            complain(f"{opened_run.path}: {note}")
    if options.out is not None:
        from trustrl.files import write_whole
        from trustrl.tools.report.html_page import page

        with written("--out", options.out):
            write_whole(options.out, page(report))
    if options.json:
        from trustrl.files import finite

        say_json(finite(summary_of(report)))
    elif options.out is not None:
        say(options.out)
    else:
        say(text(report, unicode=(sys.stdout.encoding or "").lower().startswith("utf")))
    return 1 if any(report.notes) else 0
