"""Validator for records: compares a folder or file with docs/specification/token-record.md. No torch."""

import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, NamedTuple

from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.files import parsed_json, shortened
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import checked_file, checked_json, parsed_footer
from trustrl.recording.part_names import FORM, PartName, about_name, about_numbers, dump_step
from trustrl.recording.record_files import RECORDS, RUN, SEQUENCES, TEXTS, opened
from trustrl.recording.run_file import violations
from trustrl.recording.schema import STEP_KEY, TABLE_KEY, TABLES, VERSION, VERSION_KEY
from trustrl.recording.storage import Place, Remote
from trustrl.recording.value_checks import breaches, misplaced
from trustrl.recording.writers import SUPERSEDED, Claims, claim_files, read_claim

MAX_GROUP = 65_536
"""Largest row group of the token table."""

WITH_RUN = 3
"""First version with run.json, a sequence table and a text table."""


class Finding(NamedTuple):
    """One difference between a file and the specification."""

    level: Literal["error", "warning"]
    """An error breaks the specification. A warning marks a record of impossible numbers, or an incomplete dump."""

    file: str
    text: str


@dataclass(slots=True)
class CheckedRecord:
    """Outcome of a check."""

    address: str
    files: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Rows read, by table."""

    versions: set[int] = field(default_factory=set)
    superseded: int = 0
    """Part files that a later process replaced. They are not read, and not in the other counts."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """True if no finding is an error."""
        return not any(finding.level == "error" for finding in self.findings)

    def error(self, file: Place, text: str) -> None:
        """Adds a breach of the specification."""
        self.findings.append(Finding("error", str(file), text))

    def warn(self, file: Place, text: str) -> None:
        """Adds a finding that is not a breach."""
        self.findings.append(Finding("warning", str(file), text))


def check_record(address: str | PathLike[str] | Remote) -> CheckedRecord:
    """Checks a record folder, a run directory with `records/`, or one file.

    Reads every file once, in row groups. Memory holds one row group and the ids of the sequences.

    Raises:
        ConfigError: If nothing exists at the address, or its scheme is unknown.
        RecordError: If the store cannot be read.
        MissingPackageError: If pyarrow is not installed.
    """
    where = storage.place(address)
    report = CheckedRecord(str(where))
    try:
        if storage.is_file(where):
            _check_part(report, where, _table_of(where))
        elif not storage.is_folder(where):
            raise ConfigError(f"ADDRESS must be an existing folder or file, got `{where}`.")
        else:
            inside = storage.inside(where, RECORDS)
            _check_folder(report, inside if storage.is_folder(inside) else where)
    except OSError as error:
        raise RecordError(f"Cannot read `{where}`: {str(error).rstrip('.')}.") from error
    return report


def _table_of(file: Place) -> str:
    """Returns the table that the file's metadata names; tokens if it names none, as before version 3."""
    pa = need("pyarrow", extra="records")
    try:
        with storage.readable(file) as source:
            metadata = parsed_footer(checked_file(source)[1]).metadata or {}
            named = metadata.get(TABLE_KEY, b"tokens").decode(errors="replace")
    except (pa.ArrowException, OSError):
        return "tokens"  # opening it again reports the error
    return named if named in TABLES else "tokens"


def _check_folder(report: CheckedRecord, folder: Place) -> None:
    claims = _checked_claims(report, folder)
    tokens = _check_parts(report, folder, "tokens", claims)
    sequences = _check_parts(report, storage.inside(folder, SEQUENCES), "sequences", claims)
    texts = _check_parts(report, storage.inside(folder, TEXTS), "texts", claims)
    for dump in storage.entries(folder, "dump-*"):
        _check_dump(report, dump, claims)
    _count_superseded(report, folder)
    if not report.files:
        report.error(folder, "must contain files named step-XXXXXXXX.rank-XXXX.parquet, got none.")
    if sequences:  # not every trainer describes its sequences
        known = set().union(*(ids.keys() for ids in sequences.values()))
        for name, ids in tokens.items():
            if missing := len(ids.keys() - known):
                report.error(folder / name, f"must have its sequences in {SEQUENCES}/, got {missing} that are not.")
    _check_references(report, folder, sequences, texts)
    _check_run(report, folder / RUN)


def _checked_claims(report: CheckedRecord, folder: Place) -> Claims:
    claims = []
    for file in claim_files(folder):
        try:
            claims.append(read_claim(file))
        except RecordError as error:
            report.findings.append(Finding("error", str(file), str(error)))
    return Claims(claim for claim in claims if claim is not None)


def _check_parts(
    report: CheckedRecord, folder: Place, table: str, claims: Claims | None = None, step: int | None = None
) -> dict[str, dict[int, str | None]]:
    """Checks the files of one table. Returns their sequences by file name, each with the text file that it names."""
    ids, named, others = {}, dict[PartName, Place](), list[Place]()
    for file in storage.entries(folder, "*.parquet"):
        part = PartName.of(file.name)
        if part is None:
            others.append(file)
        else:
            named[part] = file
    sifted = (claims or Claims()).sift(named, step=step)
    for file in (*others, *(named[part] for part in sifted.visible)):
        ids[file.name] = _check_part(report, file, table)
    report.superseded += len(sifted.superseded)
    for part in sifted.superseded:
        report.warn(named[part], f"must be in {SUPERSEDED}/: a later process replaced it. It moves when a run resumes.")
    for part in sifted.covered:
        report.warn(named[part], "must be gone: a merged file has its rows. `trustrl records compact` deletes it.")
    return ids


def _count_superseded(report: CheckedRecord, folder: Place) -> None:
    where = storage.inside(folder, SUPERSEDED)
    for inside in (where, *storage.entries(where, "dump-*"), where / SEQUENCES, where / TEXTS):
        report.superseded += len(storage.entries(inside, "step-*.parquet"))


def _check_part(report: CheckedRecord, file: Place, table: str) -> dict[int, str | None]:
    report.files += 1
    named = PartName.of(file.name)
    if named is None:
        report.error(file, f"must be named {FORM}.")
    ids: dict[int, str | None] = {}
    counted: Counter[tuple[bool, str]] = Counter()
    filled: dict[str, int] = {}
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", TrustRLWarning)
            with opened(file, table) as (parquet, region):
                report.versions.add(int(parquet.schema_arrow.metadata[VERSION_KEY]))
                rows = parquet.metadata.num_rows
                report.rows[table] += rows
                for group in range(parquet.metadata.num_row_groups):
                    if table == "tokens" and (size := parquet.metadata.row_group(group).num_rows) > MAX_GROUP:
                        report.error(file, f"must have row groups of at most {MAX_GROUP} rows, got {size}.")
                for batch in parquet.iter_batches(batch_size=MAX_GROUP, use_threads=False):
                    for rule, num in breaches(batch, table):
                        counted[rule.is_error, rule.text] += num
                    for name in batch.schema.names:
                        filled[name] = filled.get(name, 0) + len(batch) - batch.column(name).null_count
                    for text, flags in misplaced(batch, named):
                        counted[True, text] += need("pyarrow.compute", extra="records").sum(flags).as_py() or 0
                    repeated = _take_in(ids, batch, table, merged=named is not None and named.is_merged)
                    if repeated:
                        counted[True, "have each sequence once"] += repeated
                if table == "tokens":
                    _check_tokens(report, file, parquet, filled, region)
    except RecordError as error:
        report.findings.append(Finding("error", str(file), str(error)))
        return ids
    if said:
        report.warn(file, "must have checksums, got none. Damage may go unnoticed. trustrl 0.1 wrote such files.")
    for (is_error, text), num in sorted((+counted).items()):
        (report.error if is_error else report.warn)(file, f"must {text}, got {num} rows that do not.")
    for column in TABLES[table]:
        if not column.nullable and filled.get(column.name, rows) < rows:
            report.error(file, f"must have {column.name} in every row, got {rows - filled[column.name]} nulls.")
    return ids


def _take_in(ids: dict[int, str | None], batch: Any, table: str, *, merged: bool) -> int:
    """Adds the sequences of a batch. Returns the number of repetitions where a sequence must be unique.

    A merged file may repeat one: each of its steps may have a row for it.
    """
    sequences = batch.column("sequence")
    if table == "tokens":
        ids.update(dict.fromkeys(sequences.unique().to_pylist()))
        return 0
    texts = batch.column("text").to_pylist() if table == "sequences" else [None] * len(batch)
    before = len(ids)
    ids.update(zip(sequences.to_pylist(), texts, strict=True))
    return 0 if merged else len(batch) - (len(ids) - before)


def _check_tokens(
    report: CheckedRecord, file: Place, parquet: Any, filled: dict[str, int], region: dict[str, Any] | None
) -> None:
    rows = parquet.metadata.num_rows
    for column in TABLES["tokens"]:
        if column.nullable and 0 < filled.get(column.name, 0) < rows:
            report.error(file, f"must have {column.name} in all rows or in none, got {filled[column.name]} of {rows}.")
    for name in ("kept", "weight"):
        if rows and bool(filled.get(name)) != (region is not None):
            has = "without" if region is None else "with"
            report.error(file, f"must have {name} exactly if a region decided, got a file {has} a region.")
    try:
        counts = parsed_json(parquet.metadata.metadata[STEP_KEY])
        fits = counts["rows"] == rows <= counts["tokens_in_loss"]
    except (KeyError, ValueError, TypeError):
        report.error(file, f"must have its counts of tokens in the metadata `{STEP_KEY.decode()}`.")
        return
    if not fits:
        report.error(file, f"must have the {rows} rows that its metadata counts, got {shortened(repr(counts))}.")


def _check_references(report: CheckedRecord, folder: Place, sequences: Any, texts: Any) -> None:
    ranks: dict[int, list[tuple[PartName, Any]]] = defaultdict(list)
    for name, ids in texts.items():
        if part := PartName.of(name):
            ranks[part.rank].append((part, ids))

    def holds(name: str, sequence: int) -> bool:
        """Returns True if the rank's text file with the step has the sequence. Merging changes no names in rows."""
        part = PartName.of(name)
        if part is None:
            return False
        index = bisect_right(ranks[part.rank], part.first, key=lambda entry: entry[0].first) - 1
        return index >= 0 and sequence in ranks[part.rank][index][1]

    for name, ids in sequences.items():
        missing = sum(text is not None and not holds(text, sequence) for sequence, text in ids.items())
        if missing and texts:  # a record may be shared without its texts
            report.error(folder / SEQUENCES / name, f"must name a text file that exists, got {missing} that do not.")


def _check_dump(report: CheckedRecord, dump: Place, claims: Claims) -> None:
    parts = _check_parts(report, dump, "tokens", claims, dump_step(dump.name))
    about = storage.entries(dump, "trigger.rank-*.json")
    for file in about:
        try:
            checked_json(storage.read_bytes(file))
        except ValueError as error:
            report.error(file, f"must be a JSON object, got: {error}.")
    there = {about_numbers(file.name) for file in about}
    wanted = {(part.rank, part.attempt) for part in map(PartName.of, parts) if part is not None}
    for rank, attempt in sorted(wanted - there):
        name = about_name(rank, attempt)
        report.warn(dump, f"must have {name}, which is written last. The dump is incomplete.")


def _check_run(report: CheckedRecord, file: Place) -> None:
    if not storage.is_file(file):
        if max(report.versions, default=0) >= WITH_RUN:
            report.error(file, f"must exist since version {WITH_RUN}.")
        return
    try:
        run = checked_json(storage.read_bytes(file))
    except ValueError as error:
        report.error(file, f"must be JSON, got: {error}.")
        return
    broken = list(violations(run))
    for place, rule in broken:
        report.error(file, f"{place} must be {rule}.")
    if not broken and run["version"] > VERSION:
        report.error(file, f"run.version must be {VERSION} or lower, got {run['version']}. Install a newer trustrl.")
