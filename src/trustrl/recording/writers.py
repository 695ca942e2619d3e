"""Writers of a record: each process claims its rank before it writes, and a later claim replaces an earlier one.

A claim is a small JSON file, `writers/rank-0003.attempt-0002.json`, which says from which step on the process records.
Part files carry the number of their attempt in their names, so two processes never write the same file. A part file is
visible if no later attempt of its rank, in effect, began at or before its last step. No torch.
"""

import os
import re
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError
from trustrl.recording import storage
from trustrl.recording.checksums import checked_json, sealed_json
from trustrl.recording.part_names import PartName
from trustrl.recording.storage import Place, SamePlace

WRITERS = "writers"
"""Name of the folder of the claims, next to the part files of tokens."""

SUPERSEDED = "superseded"
"""Name of the folder to which a writer moves files that it replaces. Readers leave it out."""

_NAME = re.compile(r"rank-([0-9]{4,9})\.attempt-([0-9]{4,9})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One process's claim on a rank."""

    rank: int
    attempt: int
    """Number of the process among those that recorded this rank, from 1."""

    from_step: int
    """First step that the process records. From there on it replaces earlier attempts."""

    in_effect: bool
    """False while the process prepares the folder. Readers ignore such a claim; writers respect it."""

    world_size: int | None = None
    """Number of ranks of the run, if known. Later ranks are retired."""

    retired: bool = False
    """True if no process records this rank anymore: the run continued on fewer ranks."""

    run: str | None = None
    """Random name of the run, if its launcher gave it one."""

    host: str = ""
    pid: int = 0
    started: str = ""
    """Time of the claim, ISO 8601 in UTC."""

    token: str = ""
    """Random name of the claim, which tells two claims of one attempt apart."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return claim_name(self.rank, self.attempt)

    @property
    def metadata(self) -> dict[str, Any]:
        """Description of the writer in the metadata of its part files."""
        return {name: getattr(self, name) for name in ("run", "attempt", "rank", "world_size")}

    def who(self) -> str:
        """Returns the process for a message."""
        host = self.host or "an unknown host"
        return f"process {self.pid} on {host}, which began at step {self.from_step} at {self.started}"


def claim_name(rank: int, attempt: int) -> str:
    """Returns the name of the file of a claim."""
    return f"rank-{rank:04d}.attempt-{attempt:04d}.json"


def claim_files(folder: SamePlace, rank: int | None = None) -> list[SamePlace]:
    """Returns the files of the claims on a rank, or of all."""
    pattern = "rank-*.json" if rank is None else f"rank-{rank:04d}.attempt-*.json"
    return [file for file in storage.entries(storage.inside(folder, WRITERS), pattern) if _NAME.fullmatch(file.name)]


def claimed_ranks(folder: Place) -> set[int]:
    """Returns the ranks with a claim, by the names of the files alone."""
    return {claim_numbers(file)[0] for file in claim_files(folder)}


def claim_numbers(file: Place) -> tuple[int, int]:
    """Returns rank and attempt in the name of a claim's file."""
    rank, attempt = (part.rpartition("-")[2] for part in file.name.split(".")[:2])
    return int(rank), int(attempt)


def read_claim(file: Place) -> Claim | None:
    """Returns the claim in a file, or None if a process was killed before it wrote it.

    Raises:
        RecordError: If the file is damaged.
    """
    try:
        content = storage.read_bytes(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"Cannot read `{file}`: {str(error).rstrip('.')}.") from error
    if not content:
        return None
    try:
        data = checked_json(content)
        claim = Claim(**{field.name: data[field.name] for field in fields(Claim)})
        ok = all(isinstance(value, int) for value in (claim.rank, claim.attempt, claim.from_step))
        if not ok or claim.name != file.name:
            raise ValueError("numbers that its name contradicts")
    except (ValueError, KeyError) as error:
        raise RecordError(
            f"`{file}` must be the claim of a writer, got: {error}. It decides which files are read. Restore it, or "
            "delete it: files of its attempt then count from their first step."
        ) from None
    return claim


class TakenOver(RecordError):
    """Another process has claimed the rank."""


class Claims:
    """All claims of a record, by rank. Attempts without a claim, as before version 5, are in effect."""

    def __init__(self, claims: Iterable[Claim] = ()) -> None:
        self._by_rank: dict[int, dict[int, Claim]] = defaultdict(dict)
        for claim in claims:
            self._by_rank[claim.rank][claim.attempt] = claim

    @classmethod
    def of(cls, folder: Place, rank: int | None = None) -> "Claims":
        """Reads the claims in the folder of a record: those on one rank, or all.

        Raises:
            OSError: If the store cannot be read.
            RecordError: If a claim is damaged.
        """
        return cls(claim for claim in map(read_claim, claim_files(folder, rank)) if claim is not None)

    def __iter__(self) -> Iterator[Claim]:
        return (claim for claims in self._by_rank.values() for claim in claims.values())

    def latest(self, rank: int) -> Claim | None:
        """Returns the claim of the last attempt, in effect or not."""
        claims = self._by_rank.get(rank)
        return claims[max(claims)] if claims else None

    def sift(self, parts: Iterable[PartName], *, step: int | None = None) -> "Sifted":
        """Sorts part files into those to read, those that a later attempt replaced, and those merged into others.

        Args:
            parts: The part files of one table.
            step: The step of the dump that they are in; None outside dumps.
        """
        sifted = Sifted([], [], [])
        by_rank: dict[int, list[PartName]] = defaultdict(list)
        for part in sorted(parts):
            by_rank[part.rank].append(part)
        for rank, own in by_rank.items():
            starts = self._starts(rank, own)
            current = []
            for part in own:
                last = part.last if step is None else step
                ended = part.attempt not in starts or any(
                    attempt > part.attempt and start <= last for attempt, start in starts.items()
                )
                (sifted.superseded if ended else current).append(part)
            cover: PartName | None = None
            for part in sorted(current, key=lambda part: (part.first, -part.last, -part.attempt)):
                if cover is not None and cover.covers(part):
                    sifted.covered.append(part)
                    continue
                cover = part if cover is None or part.last >= cover.last else cover
                sifted.visible.append(part)
        sifted.visible.sort()
        return sifted

    def _starts(self, rank: int, parts: Iterable[PartName]) -> dict[int, int]:
        """Returns the first step of each attempt that is in effect; without a claim, that of its files."""
        claims = self._by_rank.get(rank, {})
        starts = {attempt: claim.from_step for attempt, claim in claims.items() if claim.in_effect}
        for part in parts:
            if part.attempt not in claims:  # a merged file begins with steps of earlier attempts
                start = part.last if part.is_merged else part.first
                starts[part.attempt] = min(start, starts.get(part.attempt, start))
        return starts


@dataclass(frozen=True, slots=True)
class Sifted:
    """Part files of one table."""

    visible: list[PartName]
    """Files to read, by step and rank."""

    superseded: list[PartName]
    """Files of steps that a later attempt recorded again, or of a rank that the run no longer has."""

    covered: list[PartName]
    """Files whose rows are in a merged file too."""


def listed(folder: SamePlace, rank: int | None = None) -> dict[PartName, SamePlace]:
    """Returns the part files directly in a folder by name, of one rank or of all. Ignores files with other names."""
    pattern = "step-*.parquet" if rank is None else f"step-*.rank-{rank:04d}*.parquet"
    named = ((PartName.of(file.name), file) for file in storage.entries(folder, pattern))
    return {part: file for part, file in named if part is not None and rank in (None, part.rank)}


def new_claim(folder: Place, claim: Claim) -> Claim | None:
    """Writes a claim under its number, or returns None if that number is taken. The first of a rank is in effect.

    Raises:
        OSError: If the claim cannot be written.
    """
    storage.make_folder(folder / WRITERS)
    claim = replace(
        claim, in_effect=claim.attempt == 1, host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(8),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return claim if _created(folder / WRITERS / claim.name, sealed_json(asdict(claim)), claim) else None


def _created(file: Place, text: str, claim: Claim) -> bool:
    """Writes a new file. Returns False if it exists, or if another process wrote it at the same time."""
    if not isinstance(file, Path):
        # A store cannot refuse to replace an object. The later writer wins; the earlier one sees it here or in `check`.
        if storage.is_file(file):
            return False
        storage.write_text(file, text)
        return _is(read_claim(file), claim)
    whole = file.with_name(f".{file.name}.{claim.token}.tmp")
    try:
        with whole.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        try:
            os.link(whole, file)
        except FileExistsError:
            return False
        except OSError:  # a filesystem without links
            with suppress(FileExistsError), file.open("x") as opened:
                opened.write(text)
                return True
            return False
    finally:
        whole.unlink(missing_ok=True)
    return True


def _is(claim: Claim | None, other: Claim) -> bool:
    return claim is not None and claim.token == other.token


def put_in_effect(folder: Place, claim: Claim) -> Claim:
    """Lets readers follow a claim. Returns it."""
    claim = replace(claim, in_effect=True)
    storage.make_folder(folder / WRITERS)
    storage.write_text(
        folder / WRITERS / claim.name, sealed_json(asdict(claim)), synced=True
    )  # torn, it hides all files
    return claim


def check_claim(folder: Place, claim: Claim) -> None:
    """Checks that no other process has claimed the rank since.

    Raises:
        TakenOver: If one has.
        OSError: If the store cannot be read.
    """
    file = folder / WRITERS / claim_name(claim.rank, claim.attempt + 1)
    later = None
    if storage.is_file(file):
        later = read_claim(file) or replace(claim, attempt=claim.attempt + 1, host="", started="an unknown time")
    elif not isinstance(folder, Path):
        own = read_claim(folder / WRITERS / claim.name)
        later = None if _is(own, claim) else own
    if later is None:
        return
    if later.retired:
        raise TakenOver(
            f"The run continues on {later.world_size} ranks without rank {claim.rank}: {later.who()}, retired it. End "
            "this process, or pass another folder"
        )
    raise TakenOver(
        f"Another process took over rank {claim.rank}: {later.who()}. Two processes must not record one rank. End one "
        "of them, or pass it another folder"
    )


def check_run(folder: Place, run: str | None, stated: Mapping[str, Any] | None) -> None:
    """Checks that a folder's record, if there is one, is not of another run.

    Args:
        folder: The folder of the record.
        run: The name of this run, or None if it is unknown.
        stated: The contents of the folder's run.json, or None.
    """
    other = (stated or {}).get("run")
    if run is not None and other is not None and run != other:
        raise RecordError(
            f"`{folder}` must be empty or have the records of run {run}, got those of run {other}. Pass another folder."
        )


def run_name(folder: Place) -> str | None:
    """Returns the name that `trustrl run` gave the run in whose directory the record is, or None."""
    if not isinstance(folder, Path):
        return None
    try:
        with (folder.parent / "run_id").open("rb") as opened:
            text = opened.read(64).decode("ascii", errors="replace").strip()
    except OSError:
        return None
    return text if re.fullmatch("[0-9a-f]{32}", text) else None
