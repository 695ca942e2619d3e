"""`trustrl audit RECORDS`: replays other regions on recorded tokens and reports what each would mask."""

import argparse
from collections.abc import Callable

from trustrl.cli.shared_options import add_anchor, add_records, add_regions, regions_of, tokenizer_of
from trustrl.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl audit`."""
    add_records(parser)
    add_anchor(parser)
    add_regions(parser, "replay")
    parser.add_argument(
        "--top", type=int, default=10, help="Number of most masked token ids to list for each region (default: 10)"
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="Show token ids as text with the tokenizer of this model name or folder"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the audit on stdout. Returns 1 if replaying the recorded region does not reproduce the records."""
    from functools import partial

    from trustrl.config import validators
    from trustrl.tools.audit.audit_json import DEFAULT_REGIONS, audit_report, check_names, record_files
    from trustrl.tools.audit.audit_text import text
    from trustrl.tools.audit.mapreduce import count_records
    from trustrl.tools.audit.record_anchor import anchor_in
    from trustrl.tools.audit.region_replay import COLUMNS, arm
    from trustrl.tools.audit.token_counts import TokenCounts

    validators.whole("--top", options.top, low=0)
    arms = [arm(name, region) for name, region in regions_of(options, otherwise=DEFAULT_REGIONS).items()]
    check_names(arms)
    text_of = None if options.tokenizer is None else _text_of(options.tokenizer)
    files = record_files(options.records)
    where = "ray" if options.ray else "processes"
    anchor = anchor_in(files, options.anchor)
    of = partial(TokenCounts.of, arms=arms, anchor=anchor)
    counts = count_records(files, of, kind=TokenCounts, columns=COLUMNS, workers=options.workers, where=where)
    report = audit_report(counts, arms, files, top=options.top, text_of=text_of, anchor=anchor)
    say_json(report) if options.json else say(text(report))
    if report["reproduced"]["kept_differs"]:
        complain(
            f"error: Replaying the recorded region must reproduce the records, but it differs at "
            f"{report['reproduced']['kept_differs']} tokens. The files were modified, or another version wrote them."
        )
        return 1
    return 0


def _text_of(name: str) -> Callable[[int], str]:
    """Returns a function from a token id to its text, with control characters escaped."""
    from trustrl.tools.audit.audit_text import printable

    tokenizer = tokenizer_of("--tokenizer", name)
    return lambda token_id: printable(tokenizer.decode([token_id]))
