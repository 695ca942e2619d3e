"""`trustrl records check ADDRESS`: compares records with their specification."""

import argparse

from trustrl.terminal import complain, one_line, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl records`."""
    parser.add_argument("action", choices=("check",), help="Check records against docs/specification/token-record.md")
    parser.add_argument(
        "addresses", metavar="ADDRESS", nargs="+",
        help="Record folders, run directories, or record files: paths, or addresses such as s3://bucket/run",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints each finding as a line on stdout, or all as one JSON object. Returns 1 if a record is invalid."""
    from trustrl.recording.record_check import check_record

    checked = [check_record(address) for address in options.addresses]
    if options.json:
        records = [
            {
                "address": one.address, "valid": one.is_valid, "versions": sorted(one.versions), "files": one.files,
                "rows": one.rows, "findings": [finding._asdict() for finding in one.findings],
            }
            for one in checked
        ]  # fmt: skip
        say_json({"version": 1, "records": records})
    for one in checked:
        if not options.json:
            for finding in one.findings:
                say(one_line(f"{finding.level}: `{finding.file}` {finding.text}"))
        counts = ", ".join(f"{num} {table}" for table, num in one.rows.items())
        verdict = "valid" if one.is_valid else "not valid"
        complain(f"{one.address}: {verdict}; {one.files} files, {counts}")
    return 0 if all(one.is_valid for one in checked) else 1
