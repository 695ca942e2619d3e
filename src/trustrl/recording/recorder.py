"""Recorder for one rank: writes a sample of each step, and the last steps in full when a trigger fires."""

import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.core.diagnostics import Sums
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.errors import RecordError, TrustRLWarning
from trustrl.optional_imports import need
from trustrl.recording import storage
from trustrl.recording.checksums import sealed_json
from trustrl.recording.dropped import Dropped
from trustrl.recording.part_names import about_name, dump_name
from trustrl.recording.rank_writer import RankWriter, reserve, set_aside
from trustrl.recording.record_writer import PartWriter
from trustrl.recording.recording_settings import OF, Facts, Recording, Trigger
from trustrl.recording.ring import Ring
from trustrl.recording.run_file import run_description, stated_run, write_run
from trustrl.recording.sequence_tables import SequenceRows, write_sequences
from trustrl.recording.storage import Place, Remote
from trustrl.recording.token_rows import HostCopy, Rows, copied_to_host, is_sampled
from trustrl.recording.uploads import FLUSH_SECONDS, Uploads
from trustrl.recording.writers import Claim, TakenOver, check_run, put_in_effect, run_name
from trustrl.regions.loading import config_to_dict


def facts_of(step: int, sums: Sums) -> Facts:
    """Extracts the facts for triggers from a step's totals. Synchronizes with the device."""
    added = sums.added
    histograms = {name: added[f"histogram/{name}"].tolist() for name in OF if f"histogram/{name}" in added}
    faults = {name.removeprefix("fault/"): int(x) for name, x in added.items() if name.startswith("fault/")}
    entropy = None
    if "entropy/kept" in added:
        measured = float(added["entropy/kept_measured"] + added["entropy/masked_measured"])
        if measured:
            entropy = float(added["entropy/kept"] + added["entropy/masked"]) / measured
    return Facts(step, histograms, entropy, {name: count for name, count in faults.items() if count})


def _world_size() -> int | None:
    """Returns the number of ranks, or None if torch.distributed does not know it."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if known else None


class Recorder:
    """Records each micro-batch as the loss saw it, without changing it.

    Host memory holds the ring (`ring_bytes`), one micro-batch in transit, and the step's sampled rows that do not yet
    fill a row group, and the step's sampled sequences. For an object store, files wait in a spool on the local disk,
    and a thread uploads them; see `trustrl.recording.uploads`. A step that cannot be written, because the disk or the
    spool is full, is dropped, counted and warned about; the ring stays, and later steps are written again.

    At its first step, the recorder claims its rank. Files that an earlier process of the rank wrote for this step and
    for later ones move to `superseded/`, because a resumed run records these steps again. If another process claims the
    rank later, this one stops recording with a warning, so that no two processes mix their tokens.
    """

    def __init__(
        self,
        settings: Recording,
        region: Region | None,
        *,
        rank: int,
        about: Mapping[str, Any] | None = None,
        run: str | None = None,
        world_size: int | None = None,
    ) -> None:
        """Creates the directory. Rank 0 also writes run.json.

        Args:
            settings: The settings of the recording.
            region: The region that decides, or None if there is none. Every file stores its settings.
            rank: The rank of this process. Part of every file's name.
            about: Facts about the run for run.json, by key: `engine` (a dictionary with `name` and `version`),
                `packages` (versions by name, in addition to the usual ones), `model`, `tokenizer`, `dtypes` (`trainer`
                and `sampler`) and `sampling` (`temperature`, `top_p`, `top_k`, `min_p`). Pass it on one rank, which
                writes run.json; rank 0 always writes it.
            run: A name of the run that a resumed process repeats and no other run has. A folder with records of another
                name is refused. None takes the name that `trustrl run` wrote, if it made the directory.
            world_size: The number of ranks. If an earlier process of the run had more, their files no longer count from
                this process's first step on. None takes that of torch.distributed, if it is initialized.

        Raises:
            RecordError: If the folder has the records of another run.
            ConfigError: If `about` has an unknown key or a value of the wrong type, or the address is unknown.
            MissingPackageError: If pyarrow, or the package that reads the address, is not installed.
            OSError: If the directory or the spool cannot be created, or the store cannot be written to.
        """
        need("pyarrow.parquet", extra="records")  # fail now, not at the first file
        self.settings = settings
        self.ring = Ring(num_steps=settings.ring_steps, max_bytes=settings.ring_bytes)
        self._rank = rank
        self._region = None if region is None else config_to_dict(region)
        self._folder = storage.place(settings.folder)
        storage.make_folder(self._folder)
        run = run or run_name(self._folder)
        if run is not None:
            check_run(self._folder, run, stated_run(self._folder))
        self._writes_run = rank == 0 or about is not None
        if self._writes_run:
            settings_of_run = config_to_dict(settings)
            shown = {name: settings_of_run[name] for name in settings_of_run if name not in ("kind", "folder", "spool")}
            write_run(self._folder, run_description(about, region=self._region, recording=shown, run=run))
        self._claim = Claim(
            rank=rank, attempt=0, from_step=0, in_effect=False, world_size=world_size or _world_size(), run=run
        )
        self._uploads: Uploads | None = None
        if isinstance(self._folder, Remote):
            self._uploads = Uploads(self._folder, rank=rank, spool=settings.spool, max_bytes=settings.spool_bytes)
            self._claim = reserve(self._uploads.store, self._claim)  # while the store may be waited for
            self._folder = self._uploads.folder
        self._writer: RankWriter | None = None
        self._dropped = Dropped(self._folder)
        self._sequences: dict[int, dict[int, dict[str, Any]]] = {}
        self._transit: HostCopy | None = None
        self._part: PartWriter | None = None
        self._num_tokens = self._num_sampled = 0
        self._facts: deque[Facts] = deque(maxlen=max([trigger.num_steps for trigger in settings.triggers], default=1))
        self._fired_at: dict[Trigger, int] = {}
        self._num_dumps = 0
        self._first_step: int | None = None
        self._stopped = False
        """True if another process took over the rank."""

        self._error: Exception | None = None
        """Reason that the records of this step cannot be written."""

    def add(
        self,
        out: LossOutput | None,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        *,
        sequences: Int[Tensor, "*batch_or_rows"],
        step: int,
        update: int = 0,
    ) -> None:
        """Adds one micro-batch without waiting for its device.

        Args:
            out: The output of `policy_loss`, or None without a region. The file has no verdicts then.
            policy: The policy's values.
            rollout: The sampler's values.
            sequences: The sequence id of each row, or of each token when packed. See `sequence_ids`.
            step: The training step.
            update: The optimizer step inside it.
        """
        if self._stopped:
            return
        if self._writer is None:
            self._begin(step)
        more = [name for name in ("topk", "kept_ids", "experts") if getattr(self.settings, name)]
        copy = copied_to_host(out, policy, rollout, sequences, shared=(step, update, self._rank), more=more)
        self._absorb()
        self._transit = copy

    def sampled(self, sequences: Int[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
        """Flags the sequences that this recorder writes. Decode only their text."""
        return is_sampled(sequences, self.settings.sample)

    def add_sequences(self, rows: SequenceRows, *, step: int) -> None:
        """Adds the sampled ones of these sequences. `end_step` writes them; a later row of an id replaces an earlier.

        Args:
            rows: Sequences of a rollout, sampled or not.
            step: The training step.
        """
        if self._stopped:
            return
        if self._writer is None:
            self._begin(step)
        if not len(rows.sequence):
            return
        keep = self.sampled(torch.as_tensor(rows.sequence, dtype=torch.int64)).tolist()
        self._sequences.setdefault(step, {}).update({row["sequence"]: row for row in rows.rows(keep)})

    def end_step(self, step: int, sums: Sums | None) -> list[Place]:
        """Writes the step's part files and, if a trigger fires, the ring.

        Args:
            step: The training step, as passed to `add`.
            sums: The step's totals over micro-batches and all ranks, so that all ranks fire together. None evaluates
                no trigger.

        Returns:
            The directory of the dump, if one was written. In an object store, `flush` waits until it is there.
        """
        if self._stopped:
            return []
        self._absorb()
        if self._writer is None:
            self._begin(step)
        self._end_files(step)
        if self._stopped:
            return []
        dumps: list[Place] = []
        fired = [] if sums is None else self._fired(step, sums)
        if fired and self._num_dumps < self.settings.max_dumps:
            try:
                dumps.append(self._dump(step, fired))
                self._num_dumps += 1
            except OSError as error:
                self._dropped.dump(step, error)
        if self._uploads is not None:
            self._uploads.say()
        return dumps

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Ends a run: waits until an object store has the files of all ended steps, and warns about missing records.

        Call it on every rank. Recording may continue afterwards.

        Args:
            seconds: Longest wait. The warning says where files wait that the store has not taken by then.
        """
        waiting = [step for step in self._sequences if step <= self._dropped.last_step]
        self._dropped.over(None, num_sequences=self._forget(waiting))
        if self._uploads is not None:
            self._uploads.flush(seconds)

    def sync(self) -> None:
        """Waits until the files of all ended steps have reached a local disk. Call it before a checkpoint is saved.

        A run that loses power and resumes from that checkpoint then has the whole record up to it.
        """
        if self._writer is None or self._stopped:
            return
        try:
            self._writer.sync()
        except OSError as error:
            text = f"Cannot sync records in `{self._folder}`: {str(error).rstrip('.')}. A power failure may lose them."
            warnings.warn(text, TrustRLWarning, stacklevel=2)

    def _end_files(self, step: int) -> None:
        """Writes the sequences of this step and of earlier ones that did not end, and finishes the part file."""
        is_new = self._part is not None
        try:
            if self._error is not None:
                raise self._error
            claim = self._own().claim
            self._own().check()
            for open_step in sorted(self._sequences):
                if open_step <= step and (rows := self._sequences[open_step]):
                    self._check_room()
                    write_sequences(
                        self._folder, list(rows.values()), step=open_step, rank=self._rank, text=self.settings.text,
                        claim=claim,
                    )  # fmt: skip
                    is_new = True
                    del self._sequences[open_step]
            if self._part is not None:
                self._part.close(num_tokens=self._num_tokens)
                self._part = None
            if is_new:
                self._dropped.over(step)
            self._own().ended(step)
        except TakenOver as error:
            self._stop(error)
        except (OSError, RecordError) as error:
            self._refuse(error)
            # Later steps of the newest rollout need its sequences.
            newest = max(self._sequences, default=-1) if isinstance(error, OSError) else None
            lost = self._forget(
                [open_step for open_step in self._sequences if open_step <= step and open_step != newest]
            )
            self._dropped.add(step, error, num_tokens=self._num_sampled, num_sequences=lost)
        self._num_tokens = self._num_sampled = 0
        self._error = None

    def _forget(self, steps: list[int]) -> int:
        """Drops the sequences of these steps. Returns their number."""
        return sum(len(self._sequences.pop(step)) for step in steps)

    def _check_room(self) -> None:
        if self._uploads is not None:
            self._uploads.check_room()

    def _begin(self, step: int) -> None:
        """Claims the rank from this step on. The step is dropped if that fails, and the next one tries again."""
        self._first_step = step if self._first_step is None else self._first_step
        claim = replace(self._claim, from_step=self._first_step)
        try:
            if self._uploads is None:
                self._writer = RankWriter.begin(self._folder, claim, ring_steps=self.settings.ring_steps)
            else:
                store = self._uploads.store
                self._uploads.begin()
                claim = put_in_effect(self._folder, claim)  # a file too, uploaded before any other of this process
                self._uploads.then(lambda: set_aside(store, claim))
                self._writer = RankWriter(store, claim, ring_steps=0)
        except (OSError, RecordError) as error:
            self._refuse(error)
            return
        if self._writer.num_replaced and self._writes_run and claim.run is None:
            warnings.warn(self._writer.replaced_all(), TrustRLWarning, stacklevel=4)

    def _own(self) -> RankWriter:
        assert self._writer is not None  # `_begin` sets it, or an error
        return self._writer

    def _stop(self, error: TakenOver) -> None:
        self._stopped = True
        self._refuse(error)
        self._transit = None
        self._sequences = {}
        self.ring = Ring(num_steps=0, max_bytes=1)
        warnings.warn(
            f"Cannot write records to `{self._folder}`: {str(error).rstrip('.')}. Recording stops; training continues.",
            TrustRLWarning,
            stacklevel=4,
        )

    def _absorb(self) -> None:
        """Stores the micro-batch that the last `add` sent to the host."""
        if self._transit is None:
            return
        copy, self._transit = self._transit, None
        rows = copy.rows()
        self._num_tokens += len(rows)
        if not len(rows):
            return
        self.ring.add(rows)
        names = copy.sequences[is_sampled(copy.sequences, self.settings.sample)]
        if not len(names):
            return
        chosen = torch.isin(rows.columns["sequence"], names).nonzero().squeeze(1)
        sampled = rows.at(chosen).whole_sequences(self.settings.max_rows_per_step - self._num_sampled)
        self._num_sampled += len(sampled)
        if len(sampled):
            self._write(sampled)

    def _write(self, rows: Rows) -> None:
        if self._error is not None:
            return
        try:
            if self._part is None:
                self._check_room()
                self._part = PartWriter(
                    self._folder, step=rows.step, rank=self._rank, region=self._region, claim=self._own().claim
                )
            self._part.add(rows)
        except OSError as error:
            self._refuse(error)

    def _fired(self, step: int, sums: Sums) -> list[dict[str, Any]]:
        self._facts.append(facts_of(step, sums))
        fired = []
        for trigger in self.settings.triggers:
            last = self._fired_at.get(trigger)
            if last is not None and step - last < trigger.at_most_every:
                continue
            numbers = trigger.fired(list(self._facts))
            if numbers is not None:
                self._fired_at[trigger] = step
                fired.append({"trigger": config_to_dict(trigger), "found": numbers})
        return fired

    def _dump(self, step: int, fired: list[dict[str, Any]]) -> Place:
        """Writes every step in the ring as a part file, then the JSON file. If that exists, the dump is complete."""
        if self._writer is None:
            raise OSError("the rank could not be claimed")
        self._check_room()
        folder, claim = self._folder / dump_name(step), self._writer.claim
        storage.make_folder(folder)
        kept = {}
        for ring_step, parts in self.ring.steps():
            num_tokens = sum(map(len, parts)) + self.ring.left_off.get(ring_step, 0)
            writer = PartWriter(folder, step=ring_step, rank=self._rank, region=self._region, claim=claim)
            try:
                for rows in parts:
                    writer.add(rows)
                writer.close(num_tokens=num_tokens)
            except OSError:
                writer.abandon()
                raise
            kept[ring_step] = {"rows": writer.num_rows, "left_off": self.ring.left_off.get(ring_step, 0)}
        about = {"step": step, "fired": fired, "steps": kept, "ring_bytes": self.ring.nbytes, "region": self._region}
        storage.write_text(folder / about_name(self._rank, claim.attempt), sealed_json(about))
        return folder

    def _refuse(self, error: OSError | RecordError) -> None:
        """Gives up on the files of this step."""
        self._error = error
        part, self._part = self._part, None
        if part is not None:
            with suppress(OSError):  # the disk that failed before
                part.abandon()
