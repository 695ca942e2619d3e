"""`trustrl audit RECORDS`: what other regions would have stopped, on tokens that were recorded."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from trustrl.cli.regions import add_regions, regions_of


def add_records(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that reads records."""
    parser.add_argument(
        "records", metavar="RECORDS", nargs="+", type=Path, help="folders of records, run folders, or files"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, through Ray Data")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    add_records(parser)
    add_regions(parser, "replay")
    parser.add_argument("--top", type=int, default=10, help="most stopped ids of each region (10)")
    parser.add_argument("--tokenizer", metavar="NAME", help="shows ids as text: a model's name or folder")


def run(options: argparse.Namespace) -> int:
    """Prints the audit on stdout; 1 where the recorded region, asked again, says something else."""
    from functools import partial

    from trustrl.audit.mapreduce import summarised
    from trustrl.audit.report import DEFAULT_REGIONS, check_names, record_files, report
    from trustrl.audit.summary import Summary
    from trustrl.audit.text import text
    from trustrl.audit.verdicts import COLUMNS, arm
    from trustrl.config import checks

    checks.whole("--top", options.top, low=0)
    arms = [arm(name, region) for name, region in regions_of(options, otherwise=DEFAULT_REGIONS).items()]
    check_names(arms)
    text_of = None if options.tokenizer is None else _text_of(options.tokenizer)
    files = record_files(options.records)
    where = "ray" if options.ray else "processes"
    of = partial(Summary.of, arms=arms)
    summary = summarised(files, of, columns=COLUMNS, workers=options.workers, where=where)
    found = report(summary, arms, files, top=options.top, text_of=text_of)
    print(json.dumps(found, indent=1) if options.json else text(found))
    if found["reproduced"]["kept_differs"]:
        print(
            f"error: The recorded region must say again what was recorded, and it differs at "
            f"{found['reproduced']['kept_differs']} tokens. The files were changed, or made by another version.",
            file=sys.stderr,
        )
        return 1
    return 0


def _text_of(name: str) -> Callable[[int], str]:
    """An id's text, with every control character escaped."""
    from trustrl.audit.text import printable
    from trustrl.cli.tokenizers import tokenizer_of

    tokenizer = tokenizer_of("--tokenizer", name)
    return lambda at: printable(tokenizer.decode([at]))
