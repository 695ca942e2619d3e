"""One process's turn at recording a rank: claims the rank, sets aside what it replaces, and merges files as it goes.

The order makes every kill harmless. The claim comes first and stops an earlier process. Then merged files that reach
beyond the first step are copied up to it. Then the claim takes effect, which is one write, and readers switch. Moving
the replaced files comes last; readers leave them out with or without it.
"""

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path

from trustrl.errors import RecordError, TrustRLWarning
from trustrl.files import sync
from trustrl.recording import storage
from trustrl.recording.compaction import BLOCKS, TABLE_FOLDERS, compact_rank, merged
from trustrl.recording.part_names import PartName, about_numbers, dump_step
from trustrl.recording.storage import Place
from trustrl.recording.writers import (
    SUPERSEDED,
    WRITERS,
    Claim,
    Claims,
    check_claim,
    claim_files,
    claim_numbers,
    claimed_ranks,
    listed,
    new_claim,
    put_in_effect,
)  # fmt: skip

MOST_UNMERGED = 64
"""Steps that may end while files are being merged. Where steps take milliseconds, the next one waits for the merge."""


class RankWriter:
    """The claim of this process on one rank, from its first step on."""

    def __init__(self, folder: Place, claim: Claim, *, ring_steps: int) -> None:
        self.claim = claim
        self.num_replaced = 0
        """Number of files set aside, if the rank has none left: the process started from scratch."""

        self._folder = folder
        self._ring_steps = ring_steps
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[int] | None = None
        self._asked: Future[None] | None = None
        self._blocks = claim.from_step // BLOCKS[0]
        """Number of blocks, counted from step 0, that are merged or being merged."""

        self._tried = 0
        """Blocks that end up to this step were merged, or could not be."""

        self._num_ended = self._num_synced = 0
        """Steps, counted from step 0, that have ended and that are on the disk."""

    @classmethod
    def begin(cls, folder: Place, claim: Claim, *, ring_steps: int = 0) -> "RankWriter":
        """Claims a rank from a step on, and retires ranks that the run no longer has.

        Args:
            folder: The local folder of the record. For a store, use `reserve` and `set_aside`.
            claim: The rank, its first step, the run and its number of ranks. The attempt is chosen here.
            ring_steps: The number of steps that a dump may contain. Later ones are not merged yet.

        Raises:
            OSError: If the folder cannot be read or written to.
            RecordError: If a file in it is damaged.
        """
        own = reserve(folder, claim)
        _remove_unfinished(folder, own)
        _retire_others(folder, claim)
        own, moved = _take_effect(folder, own)
        writer = cls(folder, own, ring_steps=ring_steps)
        if moved and not listed(folder, own.rank):
            writer.num_replaced = moved
        return writer

    def replaced_all(self) -> str:
        """Returns the warning for a process that left no file of the record."""
        return _replaced_all(self._folder, self.claim, self.num_replaced)

    def check(self) -> None:
        """Checks that no other process has claimed the rank since. A store answers in a thread, for the next call.

        Raises:
            TakenOver: If one has. It names the process.
        """
        if isinstance(self._folder, Path):
            check_claim(self._folder, self.claim)
            return
        if self._asked is not None and self._asked.done():
            answer, self._asked = self._asked, None
            with suppress(OSError):  # files of two attempts never mix, so a late answer does no harm
                answer.result()
        if self._asked is None:
            self._asked = self._thread().submit(check_claim, self._folder, self.claim)

    def ended(self, step: int) -> None:
        """Merges the files of blocks that have ended, in a thread. A store is left as it is: it has no limit on files.

        Warns if the last merge failed, and stops merging.
        """
        self._num_ended = step + 1
        if not isinstance(self._folder, Path):
            return
        blocks = (step + 1 - self._ring_steps) // BLOCKS[0]
        if self._running is not None:
            if not self._running.done() and (blocks - self._blocks) * BLOCKS[0] < MOST_UNMERGED:
                return
            error = self._running.exception()
            self._running = None
            if error is not None:
                self._blocks = 2**62  # no more
                warnings.warn(
                    f"Cannot merge record files in `{self._folder}`: {str(error).rstrip('.')}. Recording continues "
                    "without; run `trustrl records compact` on the folder later.",
                    TrustRLWarning,
                    stacklevel=4,
                )
                return
        if blocks > self._blocks:
            self._blocks = blocks
            self._running = self._thread().submit(self._compact, blocks * BLOCKS[0])

    def sync(self) -> None:
        """Waits until the rank's files of all steps that have ended, and its claim, have reached a local disk."""
        record, rank, since = self._folder, self.claim.rank, self._num_synced
        if not isinstance(record, Path):
            return
        files = {record / WRITERS / self.claim.name}
        for inside in TABLE_FOLDERS.values():
            files |= {file for part, file in listed(record / inside, rank).items() if part.last >= since}
        dumped = record.glob(f"dump-*/*.rank-{rank:04d}*")
        files |= {file for file in dumped if (dump_step(file.parent.name) or 0) >= since}
        for file in files:
            with suppress(FileNotFoundError):  # it was merged meanwhile, into a file that is on the disk
                sync(file)
        for folder in {file.parent for file in files} | {record, record.parent}:
            sync(folder)
        self._num_synced = self._num_ended

    def _thread(self) -> ThreadPoolExecutor:
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="trustrl-records")
        return self._pool

    def _compact(self, before: int) -> int:
        claims = Claims.of(self._folder, self.claim.rank)
        after, self._tried = self._tried, before
        return compact_rank(self._folder, self.claim.rank, before=before, after=after, claims=claims, check=self.check)

    def wait(self) -> BaseException | None:
        """Waits for a merge that is under way, and returns its error if it failed."""
        return None if self._running is None else self._running.exception()


def reserve(folder: Place, claim: Claim) -> Claim:
    """Takes the next number of a rank. An earlier process of the rank stops; readers follow it until `put_in_effect`.

    Raises:
        OSError: If the folder cannot be read or written to.
    """
    own = None
    while own is None:  # another process may have the number
        own = new_claim(folder, _next(folder, claim))
    return own


def set_aside(folder: Place, claim: Claim) -> list[str]:
    """Moves the files that a claim in effect replaces, also those of ranks that the run no longer has.

    Returns:
        A message if this process leaves no file of the record, or if a damaged claim leaves the files where they are.
    """
    try:
        _retire_others(folder, claim)
        moved = _move_superseded(folder, claim.rank)
    except RecordError as error:
        return [str(error)]
    everything = moved and claim.rank == 0 and claim.run is None and not listed(folder, claim.rank)
    return [_replaced_all(folder, claim, moved)] if everything else []


def _replaced_all(folder: Place, claim: Claim, moved: int) -> str:
    return (
        f"`{folder}` had a whole record from step {claim.from_step} on: its files ({moved} of rank {claim.rank}) are "
        f"now in {SUPERSEDED}/, where readers ignore them. If they are of another run, give each run its own folder."
    )


def _retire_others(folder: Place, claim: Claim) -> None:
    if claim.world_size is not None:
        ranks = claimed_ranks(folder) | {part.rank for part in listed(folder)}
        for rank in sorted(rank for rank in ranks if rank >= max(claim.world_size, claim.rank + 1)):
            _retire(folder, rank, claim)


def retire_rank(address: str | PathLike[str], rank: int, *, from_step: int) -> None:
    """Ends the record of a rank that records nothing from a step on, though the run has as many ranks as before.

    Does nothing if no process has recorded the rank. Warns if the folder cannot be read or written to.

    Args:
        address: The folder of the record.
        rank: The rank.
        from_step: First step that other ranks record in its place.
    """
    folder = storage.place(address)
    try:
        if rank in claimed_ranks(folder) or listed(folder, rank):
            _retire(folder, rank, Claim(rank=rank, attempt=0, from_step=from_step, in_effect=False))
    except (OSError, RecordError) as error:
        warnings.warn(
            f"Cannot end the record of rank {rank} in `{folder}`: {str(error).rstrip('.')}. Its files from step "
            f"{from_step} on still count.",
            TrustRLWarning,
            stacklevel=2,
        )


def _next(folder: Place, claim: Claim) -> Claim:
    """Returns the claim with the next free number. Files without a claim count as an attempt too."""
    attempts = [attempt for rank, attempt in map(claim_numbers, claim_files(folder, claim.rank)) if rank == claim.rank]
    tables = [folder / inside for inside in TABLE_FOLDERS.values()]
    for where in (*tables, *storage.entries(folder, "dump-*")):
        attempts += [part.attempt for part in listed(where, claim.rank)]
    return replace(claim, attempt=max(attempts, default=0) + 1)


def _remove_unfinished(folder: Place, claim: Claim) -> None:
    """Deletes temporary files that a killed process of this rank left behind. Only local folders have any."""
    if isinstance(folder, Path):
        for path in folder.rglob(f".*rank-{claim.rank:04d}.*.tmp"):
            if not path.name.startswith(f".{claim.name}"):
                path.unlink(missing_ok=True)


def _retire(folder: Place, rank: int, claim: Claim) -> None:
    """Claims a rank that the run no longer has, so that its files from that step on count no more."""
    latest = Claims.of(folder, rank).latest(rank)
    if latest is not None and latest.retired and latest.in_effect and latest.from_step <= claim.from_step:
        return
    own = new_claim(folder, _next(folder, replace(claim, rank=rank, retired=True)))
    if own is not None:  # otherwise another rank is doing the same
        _take_effect(folder, own)


def _take_effect(folder: Place, claim: Claim) -> tuple[Claim, int]:
    """Lets readers follow a claim, and moves the files that it replaces. Returns the number of these."""
    if not claim.in_effect:
        before = Claims.of(folder, claim.rank)
        for table, inside in TABLE_FOLDERS.items():
            where = folder / inside
            for part in before.sift(listed(where, claim.rank)).visible:
                if part.first < claim.from_step <= part.last:
                    rest = PartName(part.first, claim.from_step - 1, claim.rank, claim.attempt)
                    if not merged(where, [part], rest, table, until=claim.from_step):
                        raise RecordError(f"`{where / str(part)}` must be a file that this trustrl can copy")
        claim = put_in_effect(folder, claim)
    return claim, _move_superseded(folder, claim.rank)


def _move_superseded(folder: Place, rank: int) -> int:
    claims = Claims.of(folder, rank)
    moves: list[tuple[Place, Place]] = []
    for inside in TABLE_FOLDERS.values():
        files = listed(folder / inside, rank)
        target = folder / SUPERSEDED / inside
        moves += [(files[part], target) for part in claims.sift(files).superseded]
    dumps = storage.entries(folder, "dump-*")
    for dump in dumps:
        if (step := dump_step(dump.name)) is not None:
            about = {
                PartName(step, step, rank, numbers[1]): file
                for file in storage.entries(dump, f"trigger.rank-{rank:04d}*.json")
                if (numbers := about_numbers(file.name))
            }
            for files in (listed(dump, rank), about):
                replaced = claims.sift(files, step=step).superseded
                moves += [(files[part], folder / SUPERSEDED / dump.name) for part in replaced]
    for target in dict.fromkeys(target for _, target in moves):
        storage.make_folder(target)
    for file, target in moves:
        storage.move(file, target, file.name)
    for dump in dumps:
        storage.remove_empty(dump)
    return len(moves)
