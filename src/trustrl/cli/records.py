"""`trustrl records`: compares records with their specification, merges their files, uploads what waits in a spool."""

import argparse

from trustrl.terminal import complain, one_line, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl records`."""
    parser.add_argument(
        "action", choices=("check", "compact", "upload"),
        help="Compare records with their specification (check), merge the files of steps that have ended, if "
        "no run writes to them (compact), or upload the files that a run left on this machine because the "
        "object store failed (upload)",
    )  # fmt: skip
    parser.add_argument(
        "addresses", metavar="ADDRESS", nargs="+",
        help="Record folders, run directories, or record files: paths, or addresses such as s3://bucket/run",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object; for check")
    parser.add_argument(
        "--spool", metavar="FOLDER", help="Folder of the waiting files, as in the run's recording.spool"
    )


def run(options: argparse.Namespace) -> int:
    """Prints each finding as a line on stdout, or all as one JSON object. Returns 1 if a record is invalid."""
    return {"check": _check, "compact": _compact, "upload": _upload}[options.action](options)


def _upload(options: argparse.Namespace) -> int:
    """Uploads what waits for each address. Returns 1 if files stay."""
    from trustrl.recording.spool import upload_left

    num_messages = 0
    for address in options.addresses:
        uploaded, messages = upload_left(address, options.spool)
        for message in messages:
            say(one_line(message))
        say(f"{uploaded:,} files uploaded, {len(messages):,} left")
        num_messages += len(messages)
    return 1 if num_messages else 0


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
