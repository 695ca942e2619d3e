"""`trustrl report RUN...`: what runs did, in a terminal or as one page that needs no network."""

import argparse
import json
import sys
from pathlib import Path

from trustrl.cli.outputs import check_writable, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a folder that `trustrl run` made")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="writes the page and prints its path")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints the summary, or writes the page; 1 where a run's records cannot be read."""
    from trustrl.report.data import gather, summary_of
    from trustrl.report.runs import read_runs

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
        from trustrl.report.html import page
        from trustrl.runner.directory import write_whole

        with written("--out", options.out):
            write_whole(options.out, page(report))
    if options.json:
        from trustrl.runner.directory import finite

        print(json.dumps(finite(summary_of(report)), indent=1))
    elif options.out is not None:
        print(options.out)
    else:
        from trustrl.report.terminal import text

        print(text(report, unicode=(sys.stdout.encoding or "").lower().startswith("utf")))
    return 1 if any(report.notes) else 0
