"""Recorded tokens of a run: a sample for the scatter plots, the most masked sequences, and counts over all tokens.

Files are read one at a time and all limits are fixed, so memory does not grow with the length of a run.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict
from trustrl.errors import TrustRLError
from trustrl.optional_imports import need
from trustrl.recording.record_files import parts_in, read_table
from trustrl.tools.report.recorded_actions import DOWN, STOPPED, UP, VERDICTS, with_verdicts
from trustrl.tools.report.run_folders import read_json

SEED = 0
MAX_ROWS = 3_000_000
"""Maximum rows to read for one run. Longer runs are read every second, third, … file."""

MAX_SEQUENCES = 200
MOST_STOPPED = 20
COLUMNS = (
    "step", "update", "sequence", "position", "token_id", "advantage", "behavior_logp", "proximal_logp", "policy_logp",
    "weight", "kept", "divergence_lower", "divergence_upper", "entropy",
)  # fmt: skip
NUMBERS = (
    "advantage", "behavior_logp", "proximal_logp", "policy_logp", "weight", "divergence_lower", "divergence_upper",
    "entropy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """A sequence at one update, whose tokens the page shows."""

    sequence: int
    step: int
    update: int
    num_stopped: int
    num_changed: int
    """Number of reweighted tokens."""

    num_tokens: int
    columns: Mapping[str, list[Any]]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Recorded tokens of one run: counts over all, and a bounded sample."""

    num_rows: int
    """Tokens × updates on disk."""

    num_read: int
    num_signed: int
    """Tokens read with A ≠ 0 and finite log π and A. Shares refer to these, as in the metrics and in audits."""

    verdicts: dict[str, int]
    """Number of tokens read, by verdict."""

    points: Mapping[str, list[Any]]
    """A sample of the tokens: `mu`, `pi` (log-probs), `verdict`, `token_id`, `step`, `update`."""

    mu: str
    """Symbol of the policy whose log-prob `mu` is: μ, or π' if the records have no sampler log-probs."""

    shown: list[ShownSequence]
    most_stopped: list[dict[str, Any]]
    dumps: list[dict[str, Any]]


@dataclass(slots=True)
class _Seen:
    """Accumulator over files."""

    points: dict[str, list[Any]] = field(
        default_factory=lambda: {k: [] for k in ("mu", "pi", "verdict", "token_id", "step", "update")}
    )
    verdicts: Counter[int] = field(default_factory=Counter)
    tokens: dict[int | None, list[float]] = field(default_factory=dict)
    """By id: tokens with A ≠ 0, masked, masked while rising, and sums of exp(mu) and exp(pi) over masked tokens."""

    best: dict[int, tuple[int, int, int, Path, int]] = field(default_factory=dict)
    """By sequence: (masked, reweighted, tokens, file, update) at the update that masked most."""

    symbols: set[str] = field(default_factory=set)


def record_files(folder: Path) -> list[Path]:
    """Returns the record files of a run. A dump that has a step in full replaces the sample of that step."""
    found = {file.name: file for file in parts_in(folder)}
    found |= {file.name: file for file in sorted(folder.glob("dump-*/step-*.parquet"))}
    return [found[name] for name in sorted(found)]


def read_tokens(folder: Path, *, max_points: int, max_shown: int) -> TokenSample | None:
    """Reads the records in a folder. Returns None if it has none.

    Args:
        folder: The folder `records/` of a run.
        max_points: Maximum tokens in the scatter plots.
        max_shown: Maximum tokens to show as text.

    Raises:
        RecordError: If a file cannot be read.
        MissingPackageError: If pyarrow is not installed.
    """
    files = record_files(folder)
    if not files:
        return None
    counts = [_num_rows(file) for file in files]
    every = -(-sum(counts) // MAX_ROWS) or 1
    read, read_counts = files[::every], counts[::every]
    num_read = sum(read_counts)
    wanted = sorted(random.Random(SEED).sample(range(num_read), min(max_points, num_read)))
    seen, start = _Seen(), 0
    for file, count in zip(read, read_counts, strict=True):
        low, high = bisect_left(wanted, start), bisect_left(wanted, start + count)
        _take_in(seen, file, [at - start for at in wanted[low:high]])
        start += count
    return TokenSample(
        num_rows=sum(counts),
        num_read=num_read,
        num_signed=int(sum(signed for signed, *_ in seen.tokens.values())),
        verdicts={name: seen.verdicts[code] for code, name in enumerate(VERDICTS)},
        points=seen.points,
        mu="μ" if "μ" in seen.symbols else "π'",
        shown=list(_shown(seen, max_shown)),
        most_stopped=_most_stopped(seen),
        dumps=[_dump(one) for one in sorted(folder.glob("dump-*")) if one.is_dir()],
    )


def _num_rows(file: Path) -> int:
    """Returns the row count from the file footer, or 0 if it has none; `read_table` then raises."""
    pq, pa = need("pyarrow.parquet", extra="records"), need("pyarrow", extra="records")
    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError):
        return 0


def _decided(file: Path) -> tuple[Any, str]:
    """Returns the rows with verdicts and a column `mu`, and the symbol of the policy that `mu` belongs to."""
    table, plain = read_table(file, COLUMNS)
    table = with_verdicts(table.combine_chunks(), _region(plain))
    symbol = "μ" if table["behavior_logp"].null_count < len(table) else "π'"
    return table.append_column("mu", table["behavior_logp" if symbol == "μ" else "proximal_logp"]), symbol


def _region(plain: dict[str, Any] | None) -> Region | None:
    try:
        return None if plain is None else config_from_dict(plain)
    except (TrustRLError, TypeError):  # not registered here
        return None


def _take_in(seen: _Seen, file: Path, places: list[int]) -> None:
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    table, symbol = _decided(file)
    seen.symbols.add(symbol)
    chosen = table.take(pa.array(places, pa.int64()))
    for name, column in (
        ("mu", "mu"),
        ("pi", "policy_logp"),
        ("verdict", "verdict"),
        ("token_id", "token_id"),
        ("step", "step"),
        ("update", "update"),
    ):
        seen.points[name] += chosen[column].to_pylist()
    for one in pc.value_counts(table["verdict"]).to_pylist():
        seen.verdicts[one["values"]] += one["counts"]
    stopped = pc.equal(table["verdict"], STOPPED)
    changed = pc.is_in(table["verdict"], value_set=pa.array([DOWN, UP], pa.int8()))
    advantage = table["advantage"]
    finite = pc.and_(pc.is_finite(table["policy_logp"]), pc.is_finite(advantage))
    signed = pc.fill_null(pc.and_(finite, pc.not_equal(advantage, 0.0)), True)
    rising = pc.and_(stopped, pc.fill_null(pc.greater(table["policy_logp"], table["mu"]), False))

    def whole(flags: Any) -> Any:
        return pc.cast(flags, pa.int64())

    def where_stopped(logp: Any) -> Any:
        return pc.if_else(stopped, pc.fill_null(pc.exp(pc.cast(logp, pa.float64())), 0.0), 0.0)

    flags = pa.table(
        {
            "token_id": table["token_id"], "sequence": table["sequence"], "update": table["update"],
            "signed": whole(signed), "stopped": whole(stopped), "changed": whole(changed), "rising": whole(rising),
            "mu": where_stopped(table["mu"]), "pi": where_stopped(table["policy_logp"]),
        }
    )  # fmt: skip
    by_token = flags.group_by("token_id").aggregate(
        [(name, "sum") for name in ("signed", "stopped", "rising", "mu", "pi")]
    )
    for one in by_token.to_pylist():
        sums = seen.tokens.setdefault(one["token_id"], [0.0] * 5)
        for at, name in enumerate(("signed_sum", "stopped_sum", "rising_sum", "mu_sum", "pi_sum")):
            sums[at] += one[name] or 0
    by_sequence = flags.group_by(["sequence", "update"]).aggregate(
        [("stopped", "sum"), ("changed", "sum"), ("stopped", "count")]
    )
    for one in by_sequence.to_pylist():
        found = (one["stopped_sum"], one["changed_sum"], one["stopped_count"], file, one["update"])
        if found[:2] > seen.best.get(one["sequence"], (-1, -1))[:2]:
            seen.best[one["sequence"]] = found


def _shown(seen: _Seen, max_shown: int) -> Iterator[ShownSequence]:
    """Yields the sequences with the most masked, then reweighted, tokens that fit within the limits."""
    ranked = sorted(seen.best.items(), key=lambda item: (-item[1][0], -item[1][1], str(item[1][3]), item[0]))
    chosen, room = [], max_shown
    for sequence, best in ranked:
        if best[2] <= room and len(chosen) < MAX_SEQUENCES:
            room -= best[2]
            chosen.append((sequence, best))
    rows = {}
    for file in dict.fromkeys(best[3] for _, best in chosen):
        rows |= {(file, *key): found for key, found in _rows_of(file, {s for s, best in chosen if best[3] == file})}
    known = set()
    for sequence, (stopped, changed, num_tokens, file, update) in chosen:
        columns = rows[file, sequence, update]
        text = (file, update, *columns["token_id"])
        if text in known:  # the same completion, sampled twice for one prompt
            continue
        known.add(text)
        yield ShownSequence(sequence, columns["step"][0], update, stopped, changed, num_tokens, columns)


def _rows_of(file: Path, sequences: set[int]) -> Iterator[tuple[tuple[int, int], dict[str, list[Any]]]]:
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    table, _ = _decided(file)
    table = table.filter(pc.is_in(table["sequence"], value_set=pa.array(sorted(sequences), pa.int64())))
    table = table.sort_by([("sequence", "ascending"), ("update", "ascending"), ("position", "ascending")])
    columns = {
        name: table[name].to_pylist()
        for name in ("sequence", "update", "step", "position", "token_id", "verdict", *NUMBERS)
    }
    keys = list(zip(columns["sequence"], columns["update"], strict=True))
    start = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[start]:
            yield keys[start], {name: values[start:at] for name, values in columns.items()}
            start = at


def _most_stopped(seen: _Seen) -> list[dict[str, Any]]:
    ranked = sorted(seen.tokens.items(), key=lambda item: (-item[1][1], -1 if item[0] is None else item[0]))
    return [
        {
            "token_id": token, "signed": int(signed), "stopped": int(stopped), "rising": int(rising),
            "mu": mu / stopped, "pi": pi / stopped,
        }
        for token, (signed, stopped, rising, mu, pi) in ranked[:MOST_STOPPED]
        if stopped
    ]  # fmt: skip


def _dump(folder: Path) -> dict[str, Any]:
    """Returns the step of a dump and the triggers that fired."""
    about = next(
        (found for file in sorted(folder.glob("trigger.*.json")) if isinstance(found := read_json(file), dict)), {}
    )
    fired = about.get("fired")
    causes = [one for one in fired if isinstance(one, dict)] if isinstance(fired, list) else []
    return {"name": folder.name, "step": about.get("step"), "causes": causes}
