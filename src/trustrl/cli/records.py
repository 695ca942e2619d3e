"""`trustrl records check ADDRESS`: compares records with their specification. `compact` merges their files."""

import argparse

from trustrl.terminal import complain, one_line, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl records`."""
    parser.add_argument(
        "action", choices=("check", "compact"),
        help="Check records against docs/specification/token-record.md, or merge the files of steps that have ended. "
        "Compact only records that no run writes to",
    )  # fmt: skip
    parser.add_argument(
        "addresses", metavar="ADDRESS", nargs="+",
        help="Record folders, run directories, or record files: paths, or addresses such as s3://bucket/run",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints each finding as a line on stdout, or all as one JSON object. Returns 1 if a record is invalid."""
    return _compact(options) if options.action == "compact" else _check(options)


def _check(options: argparse.Namespace) -> int:
    from trustrl.recording.record_check import check_record

    checked = [check_record(address) for address in options.addresses]
    if options.json:
        records = [
            {
                "address": record.address, "valid": record.is_valid, "versions": sorted(record.versions),
                "files": record.files, "rows": record.rows, "superseded": record.superseded,
                "findings": [finding._asdict() for finding in record.findings],
            }
            for record in checked
        ]  # fmt: skip
        say_json({"version": 1, "records": records})
    for record in checked:
        if not options.json:
            for finding in record.findings:
                say(one_line(f"{finding.level}: `{finding.file}` {finding.text}"))
        counts = ", ".join(f"{num} {table}" for table, num in record.rows.items())
        verdict = "valid" if record.is_valid else "not valid"
        more = f"; {record.superseded} superseded files not read" * bool(record.superseded)
        complain(f"{record.address}: {verdict}; {record.files} files, {counts}{more}")
    return 0 if all(record.is_valid for record in checked) else 1


def _compact(options: argparse.Namespace) -> int:
    from trustrl.recording.compaction import compact_record

    compacted = [(address, *compact_record(address)) for address in options.addresses]
    if options.json:
        records = [{"address": address, "files_before": before, "files": after} for address, before, after in compacted]
        say_json({"version": 1, "records": records})
    for address, before, after in compacted:
        complain(f"{address}: {before} files before, {after} after")
    return 0
