"""Recorded tokens of a run: what the region did to each, counts over all, a sample, and scores of each sequence.

The row of a token alone shows what the region did to it. The sample is for the scatter plots. Files are read a few at
a time and all limits are fixed, so memory does not grow with the number of tokens.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trustrl.config.axes import Region
from trustrl.config.terms import reads_sequences
from trustrl.errors import RecordError, TrustRLError
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import checked_json
from trustrl.recording.record_files import opened, parts_in, read_again, read_table
from trustrl.recording.storage import Place
from trustrl.regions.loading import config_from_dict
from trustrl.tools.report.sequence_scores import SequenceScores

VERDICTS = ("kept", "stopped", "down-weighted", "up-weighted", "no gradient", "not finite", "no verdict")
"""Verdicts by code, as `--json` names them."""

LABELS = {name: "masked" if name == "stopped" else name for name in VERDICTS}
"""Verdicts as reports show them."""

KEPT, STOPPED, DOWN, UP, NO_GRADIENT, NOT_FINITE, NO_VERDICT = range(len(VERDICTS))
WITH_GRADIENT = VERDICTS[:4]
"""Verdicts on tokens that have a gradient. The region does not affect the others."""

TOLERANCE = 0.01
"""Relative difference within which a weight equals the token's ratio."""

MEANINGS = {
    "kept": "gradient kept, and the weight is the ratio",
    "stopped": "the region masked the gradient",
    "down-weighted": "kept with a weight more than 1% below the ratio",
    "up-weighted": "kept with a weight more than 1% above the ratio",
    "no gradient": "advantage or weight is 0",
    "not finite": "a log-prob, weight, or advantage is NaN or infinite",
    "no verdict": "the run has no region",
}

SEED = 0
MAX_ROWS = 1_000_000
"""Maximum rows to read for one run. Of longer runs, every second, third, … row group is read."""

ROWS_AT_ONCE = 131_072
"""Rows that are read into one table. A larger row group is a table by itself."""

MOST_STOPPED = 20
SUMS = ("signed", "stopped", "rising", "mu", "pi")
"""Sums for each token id: tokens with A ≠ 0, masked, masked while rising, and exp(mu) and exp(pi) of masked ones."""

ADDED_AFTER = 64
"""Number of tables after which the sums of token ids are added up, which bounds memory."""

COLUMNS = (
    "step", "update", "sequence", "position", "token_id", "advantage", "behavior_logp", "proximal_logp", "policy_logp",
    "weight", "kept", "divergence_lower", "divergence_upper", "entropy",
)  # fmt: skip
POINTS = {"mu": "mu", "pi": "policy_logp"} | {name: name for name in ("verdict", "token_id", "step", "update")}
"""Columns of the sample, by their names in it."""


class Part(NamedTuple):
    """Row groups of a record file that are read into one table."""

    file: Place
    groups: list[int]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Recorded tokens of one run: counts over all, and a bounded sample."""

    num_rows: int
    """Tokens × updates on disk."""

    num_read: int
    num_signed: int
    """Tokens read with A ≠ 0 and finite log π and A. Shares refer to these, as in the metrics and in audits."""

    verdicts: dict[str, int]
    """Number of tokens read, by verdict; empty if no region decided on them."""

    points: Mapping[str, list[Any]]
    """A sample of the tokens: `mu`, `pi` (log-probs), `verdict`, `token_id`, `step`, `update`."""

    mu: str
    """Symbol of the policy whose log-prob `mu` is: μ, or π' if the records have no sampler log-probs."""

    scores: SequenceScores
    most_stopped: list[dict[str, Any]]
    dumps: list[dict[str, Any]]


@dataclass(slots=True)
class _Seen:
    """Accumulator over files."""

    scores: SequenceScores
    points: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in POINTS})
    verdicts: Counter[int] = field(default_factory=Counter)
    sums: list[Any] = field(default_factory=list)
    """Tables of `SUMS` by token id, not yet added up."""

    symbols: set[str] = field(default_factory=set)


def record_files(folders: Sequence[str]) -> list[Place]:
    """Returns the record files of a run. A dump that has a step in full replaces the sample of that step."""
    files: dict[tuple[str, str], Place] = {}
    for folder in folders:
        place = storage.place(folder)
        files |= {(folder, file.name): file for file in parts_in(place)}
        files |= {(folder, file.name): file for dump in storage.entries(place, "dump-*") for file in parts_in(dump)}
    return [files[name] for name in sorted(files)]


def read_tokens(folders: Sequence[str], *, max_points: int) -> TokenSample | None:
    """Reads the records of a run. Returns None if it has none.

    Args:
        folders: Folders of records.
        max_points: Maximum tokens in the scatter plots.

    Raises:
        RecordError: If a file cannot be read.
        MissingPackageError: If pyarrow is not installed.
    """
    return read_again(lambda: _sample(folders, max_points))


def _sample(folders: Sequence[str], max_points: int) -> TokenSample | None:
    files = record_files(folders)
    if not files:
        return None
    groups = [(file, group, rows) for file in files for group, rows in enumerate(_rows_of_groups(file))]
    num_rows = sum(rows for _, _, rows in groups)
    read = groups[:: -(-num_rows // MAX_ROWS) or 1]
    num_read = sum(rows for _, _, rows in read)
    wanted = sorted(random.Random(SEED).sample(range(num_read), min(max_points, num_read)))
    parts = _parts(read)
    seen, start = _Seen(SequenceScores([part.file for part in parts])), 0
    for table, symbol in decided(parts):
        low, high = bisect_left(wanted, start), bisect_left(wanted, start + len(table))
        seen.symbols.add(symbol)
        _take_in(seen, table, [index - start for index in wanted[low:high]])
        start += len(table)
    has_verdicts = set(seen.verdicts) != {NO_VERDICT}
    sums = _added(seen.sums)
    return TokenSample(
        num_rows=num_rows,
        num_read=num_read,
        num_signed=need("pyarrow.compute", extra="records").sum(sums["signed"]).as_py() or 0,
        verdicts={name: seen.verdicts[code] for code, name in enumerate(VERDICTS)} if has_verdicts else {},
        points=seen.points,
        mu="μ" if "μ" in seen.symbols else "π'",
        scores=seen.scores,
        most_stopped=_most_stopped(sums),
        dumps=[_dump(dump) for folder in folders for dump in storage.entries(storage.place(folder), "dump-*")],
    )


def _rows_of_groups(file: Place) -> list[int]:
    """Returns the rows of each row group as the footer of a file states them. Reading the file checks them."""
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    with suppress(pa.ArrowException, OSError), storage.readable(file) as opened_file:
        metadata = pq.read_metadata(opened_file)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if min(rows, default=0) >= 0 and sum(rows) == metadata.num_rows < 2**31:
            return rows
    with opened(file) as (parquet, _):  # says what is wrong
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def _parts(groups: Sequence[tuple[Place, int, int]]) -> list[Part]:
    """Returns row groups of one file together, as far as a table holds them."""
    parts: list[Part] = []
    room = 0
    for file, group, rows in groups:
        if not parts or parts[-1].file != file or rows > room:
            parts.append(Part(file, []))
            room = ROWS_AT_ONCE
        parts[-1].groups.append(group)
        room -= rows
    return parts


def decided(parts: Sequence[Part]) -> Iterator[tuple[Any, str]]:
    """Yields the rows of parts in order, with the symbol of the policy that their column `mu` belongs to.

    Adds the columns `verdict`, `mu`, and `file`, the index of each row's part. Small parts share a table.
    """
    pa = need("pyarrow", extra="records")
    waiting: list[Any] = []
    before: Any = None
    for index, part in enumerate(parts):
        table, plain = read_table(part.file, COLUMNS, part.groups)
        # The anchor and the region decide over whole files.
        alike = plain, *(table[name].null_count < len(table) for name in ("behavior_logp", "proximal_logp"))
        if waiting and (alike != before or sum(map(len, waiting)) + len(table) > ROWS_AT_ONCE):
            yield _decided(waiting, before[0])
            waiting = []
        before = alike
        waiting.append(table.append_column("file", pa.repeat(index, len(table))))
    if waiting:
        yield _decided(waiting, before[0])


def _decided(tables: Sequence[Any], plain: dict[str, Any] | None) -> tuple[Any, str]:
    pa = need("pyarrow", extra="records")
    table = with_verdicts(pa.concat_tables(tables).combine_chunks(), _region(plain))
    symbol = "μ" if table["behavior_logp"].null_count < len(table) else "π'"
    return table.append_column("mu", table["behavior_logp" if symbol == "μ" else "proximal_logp"]), symbol


def _region(plain: dict[str, Any] | None) -> Region | None:
    try:
        return None if plain is None else config_from_dict(plain)
    except (TrustRLError, TypeError):  # not registered here
        return None


def _take_in(seen: _Seen, table: Any, places: list[int]) -> None:
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    chosen = table.take(pa.array(places, pa.int64()))
    for name, column in POINTS.items():
        seen.points[name] += chosen[column].to_pylist()
    for row in pc.value_counts(table["verdict"]).to_pylist():
        seen.verdicts[row["values"]] += row["counts"]
    _count_tokens(seen, table)
    seen.scores.add(_scored(table))


def _count_tokens(seen: _Seen, table: Any) -> None:
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    stopped = pc.equal(table["verdict"], STOPPED)
    finite = pc.and_(pc.is_finite(table["policy_logp"]), pc.is_finite(table["advantage"]))
    signed = pc.fill_null(pc.and_(finite, pc.not_equal(table["advantage"], 0.0)), True)
    rising = pc.and_(stopped, pc.fill_null(pc.greater(table["policy_logp"], table["mu"]), False))

    def where_stopped(logp: Any) -> Any:
        return pc.if_else(stopped, pc.fill_null(pc.exp(pc.cast(logp, pa.float64())), 0.0), 0.0)

    flags = pa.table(
        {
            "token_id": table["token_id"], "signed": pc.cast(signed, pa.int64()),
            "stopped": pc.cast(stopped, pa.int64()), "rising": pc.cast(rising, pa.int64()),
            "mu": where_stopped(table["mu"]), "pi": where_stopped(table["policy_logp"]),
        }
    )  # fmt: skip
    seen.sums.append(_added([flags]))
    if len(seen.sums) >= ADDED_AFTER:
        seen.sums = [_added(seen.sums)]


def _added(tables: Sequence[Any]) -> Any:
    """Returns one table with the sums of each token id."""
    pa = need("pyarrow", extra="records")
    grouped = pa.concat_tables(tables).group_by("token_id").aggregate([(name, "sum") for name in SUMS])
    return grouped.select(["token_id", *(f"{name}_sum" for name in SUMS)]).rename_columns(["token_id", *SUMS])


def _scored(table: Any) -> Any:
    """Returns the columns of tokens that scores of sequences sum up."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")

    def distance(column: Any, other: Any) -> Any:
        difference = pc.abs(pc.subtract(column, other))
        return pc.if_else(pc.is_finite(difference), difference, None)

    return pa.table(
        {
            "sequence": table["sequence"], "update": table["update"], "file": table["file"], "step": table["step"],
            "stopped": pc.cast(pc.equal(table["verdict"], STOPPED), pa.int64()),
            "changed": pc.cast(pc.is_in(table["verdict"], value_set=pa.array([DOWN, UP], pa.int8())), pa.int64()),
            "log_ratio": distance(table["policy_logp"], table["mu"]),
            "gap": distance(table["proximal_logp"], table["behavior_logp"]),
            "advantage": pc.if_else(pc.is_finite(table["advantage"]), table["advantage"], None),
        }
    )  # fmt: skip


def _most_stopped(sums: Any) -> list[dict[str, Any]]:
    pc = need("pyarrow.compute", extra="records")
    masked = sums.filter(pc.greater(sums["stopped"], 0))
    ranked = masked.sort_by([("stopped", "descending"), ("token_id", "ascending")]).slice(0, MOST_STOPPED)
    return [
        token | {"mu": token["mu"] / token["stopped"], "pi": token["pi"] / token["stopped"]}
        for token in ranked.to_pylist()
    ]


def _dump(folder: Place) -> dict[str, Any]:
    """Returns the step of a dump and the triggers that fired."""
    about: dict[str, Any] = {}
    for file in storage.entries(folder, "trigger.*.json")[:1]:
        try:
            about = checked_json(storage.read_bytes(file))
        except (OSError, ValueError) as error:
            raise RecordError(f"`{file}` must be a JSON file, got: {str(error).rstrip('.')}.") from None
    fired = about.get("fired")
    causes = [cause for cause in fired if isinstance(cause, dict)] if isinstance(fired, list) else []
    return {"name": folder.name, "step": about.get("step"), "causes": causes}


def with_verdicts(table: Any, region: Region | None) -> Any:
    """Adds a column `verdict` to the table.

    Weights are compared with the ratio π/b, or with π/μ if the region also corrects the sampler mismatch. Weights that
    belong to a whole sequence are not compared. Tokens that no region decided on have the verdict "no verdict".
    """
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    logp, weight, advantage = table["policy_logp"], table["weight"], table["advantage"]
    needs = None if region is None else region.needs()
    anchors = ("behavior_logp", "proximal_logp")
    if needs is not None and needs.anchors == {"proximal"}:
        anchors = anchors[::-1]
    anchor = table[anchors[0]] if table[anchors[0]].null_count < len(table) else table[anchors[1]]
    ratio = pc.exp(pc.subtract(logp, anchor))
    # The weights of tokens are compared unless they are one ratio or correction per sequence.
    own_reduction = needs is not None and needs.reduction is not None
    compared = not reads_sequences(getattr(region, "correction", None)) and not own_reduction
    lower = pc.and_(compared, pc.less(weight, pc.multiply(ratio, 1 - TOLERANCE)))
    higher = pc.and_(compared, pc.greater(weight, pc.multiply(ratio, 1 + TOLERANCE)))
    finite = pc.and_(pc.is_finite(logp), pc.and_(pc.fill_null(pc.is_finite(weight), True), pc.is_finite(advantage)))
    cases = [
        (pc.invert(finite), NOT_FINITE),
        (pc.is_null(table["kept"]), NO_VERDICT),
        (pc.equal(advantage, 0.0), NO_GRADIENT),
        (pc.invert(table["kept"]), STOPPED),
        (pc.equal(weight, 0.0), NO_GRADIENT),
        (lower, DOWN),
        (higher, UP),
    ]
    conditions = pc.make_struct(*(pc.fill_null(case, False) for case, _ in cases))
    codes = [pa.scalar(code, pa.int8()) for _, code in cases]
    verdict = pc.case_when(conditions, *codes, pa.scalar(KEPT, pa.int8()))
    return table.append_column("verdict", verdict)
