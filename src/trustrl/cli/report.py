"""`trustrl report RUN...`: summarizes runs in the terminal or as one self-contained HTML page."""

import argparse
import json
import sys
from pathlib import Path

from trustrl.cli.shared_options import check_writable, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="Run directory that `trustrl run` created")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="Write the HTML page and print its path")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the summary or writes the page. Returns 1 if the records of a run cannot be read."""
    from trustrl.tools.report.report_contents import gather, summary_of
    from trustrl.tools.report.run_folders import read_runs

    runs = read_runs(options.runs)
    if options.out is not None:
        with written("--out", options.out):
            if not options.out.parent.exists():
                options.out.parent.mkdir(parents=True)
        check_writable("--out", options.out)
    report = gather(runs) if options.out is not None else gather(runs, max_points=0, max_shown=0)
    for one, note in zip(runs, report.notes, strict=True):
        if note:
            print(f"{one.path}: {note}", file=sys.stderr)
    if options.out is not None:
        from trustrl.runner.directory import write_whole
        from trustrl.tools.report.html_page import page

        with written("--out", options.out):
            write_whole(options.out, page(report))
    if options.json:
        from trustrl.runner.directory import finite

        print(json.dumps(finite(summary_of(report)), indent=1))
    elif options.out is not None:
        print(options.out)
    else:
        from trustrl.tools.report.terminal_text import text

        print(text(report, unicode=(sys.stdout.encoding or "").lower().startswith("utf")))
    return 1 if any(report.notes) else 0
