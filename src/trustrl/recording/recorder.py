"""One rank's records: a sample of each step to disk, the last steps in a ring, the ring too when a trigger fires."""

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.loading import config_to_dict
from trustrl.diagnostics import Sums
from trustrl.errors import TrustRLWarning
from trustrl.objective import LossOutput
from trustrl.packages import need
from trustrl.recording.facts import facts_of
from trustrl.recording.files import about_name, dump_name, remove_from, remove_unfinished
from trustrl.recording.ring import Ring
from trustrl.recording.rows import HostCopy, Rows, copied_to_host
from trustrl.recording.sequences import is_sampled
from trustrl.recording.settings import Recording
from trustrl.recording.triggers import Facts, Trigger
from trustrl.recording.writing import PartWriter, write_json
from trustrl.records import PolicyTokens, RolloutTokens


class Recorder:
    """Takes each micro-batch as the loss saw it. It reads, and changes nothing.

    Memory on the host: the ring (`ring_bytes`), one micro-batch in transit, and the step's sampled rows that are not
    yet a row group. A full disk ends the recording with a warning, not the training.

    What an earlier process of the same rank wrote of the first step and of later ones is removed: a resumed run
    measures it again.
    """

    def __init__(self, settings: Recording, region: Region, *, rank: int) -> None:
        """Makes the folder.

        Args:
            settings: what to record.
            region: whose decisions they are; written into every file.
            rank: of this process; part of every file's name.

        Raises:
            MissingPackageError: pyarrow is not installed.
            OSError: the folder cannot be made.
        """
        need("pyarrow.parquet", extra="records")  # now, not at the first file
        self.settings = settings
        self.ring = Ring(num_steps=settings.ring_steps, max_bytes=settings.ring_bytes)
        self._rank = rank
        self._region = config_to_dict(region)
        self._folder = Path(settings.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self._folder, rank)
        self._transit: HostCopy | None = None
        self._part: PartWriter | None = None
        self._num_tokens = self._num_sampled = 0
        self._facts: deque[Facts] = deque(maxlen=max([trigger.num_steps for trigger in settings.triggers], default=1))
        self._fired_at: dict[Trigger, int] = {}
        self._num_dumps = 0
        self._began = self._stopped = False

    def add(
        self,
        out: LossOutput,
        policy: PolicyTokens,
        rollout: RolloutTokens,
        *,
        sequences: Int[Tensor, "*batch_or_rows"],
        step: int,
        update: int = 0,
    ) -> None:
        """Takes in one micro-batch; does not wait for its device.

        Args:
            out: what `policy_loss` decided.
            policy: the policy's side.
            rollout: the sampler's side.
            sequences: the name of each row's sequence, or of each token's when packed: see `sequence_ids`.
            step: the training step.
            update: the optimiser step inside it.
        """
        if not self._began:
            self._begin(step)
        if self._stopped:
            return
        copy = copied_to_host(
            out, policy, rollout, sequences, shared=(step, update, self._rank), topk=self.settings.topk
        )
        self._absorb()
        self._transit = None if self._stopped else copy

    def end_step(self, step: int, sums: Sums) -> list[Path]:
        """Writes the step's part file and, if a trigger fires, the ring.

        Args:
            step: the training step, as given to `add`.
            sums: its totals over micro-batches and all ranks, so that all ranks fire together.

        Returns:
            The folder of the dump, if there was one.
        """
        if self._stopped:
            return []
        self._absorb()
        dumps: list[Path] = []
        try:
            if self._part is not None:
                self._part.close(num_tokens=self._num_tokens)
            self._facts.append(facts_of(step, sums))
            fired = self._fired(step)
            if fired and self._num_dumps < self.settings.max_dumps:
                self._num_dumps += 1
                dumps.append(self._dump(step, fired))
        except OSError as error:
            self._stop(error)
        self._part = None
        self._num_tokens = self._num_sampled = 0
        return dumps

    def _begin(self, step: int) -> None:
        """Takes back what this process will record again."""
        self._began = True
        try:
            remove_from(self._folder, step, self._rank)
        except OSError as error:
            self._stop(error)

    def _absorb(self) -> None:
        """Files what the last `add` sent to the host; by now it has arrived."""
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
        try:
            if self._part is None:
                self._part = PartWriter(self._folder, step=rows.step, rank=self._rank, region=self._region)
            self._part.add(rows)
        except OSError as error:
            self._stop(error)

    def _fired(self, step: int) -> list[dict[str, Any]]:
        found = []
        for trigger in self.settings.triggers:
            last = self._fired_at.get(trigger)
            if last is not None and step - last < trigger.at_most_every:
                continue
            numbers = trigger.fired(list(self._facts))
            if numbers is not None:
                self._fired_at[trigger] = step
                found.append({"trigger": config_to_dict(trigger), "found": numbers})
        return found

    def _dump(self, step: int, fired: list[dict[str, Any]]) -> Path:
        """Every step in the ring as a part file; the JSON comes last, so where it is, the dump is whole."""
        folder = self._folder / dump_name(step)
        folder.mkdir(exist_ok=True)
        kept = {}
        for at, parts in self.ring.steps():
            num_tokens = sum(map(len, parts)) + self.ring.left_off.get(at, 0)
            writer = PartWriter(folder, step=at, rank=self._rank, region=self._region)
            try:
                for rows in parts:
                    writer.add(rows)
                writer.close(num_tokens=num_tokens)
            except OSError:
                writer.abandon()
                raise
            kept[at] = {"rows": writer.num_rows, "left_off": self.ring.left_off.get(at, 0)}
        about = {"step": step, "fired": fired, "steps": kept, "ring_bytes": self.ring.nbytes, "region": self._region}
        write_json(folder / about_name(self._rank), about)
        return folder

    def _stop(self, error: OSError) -> None:
        self._stopped = True
        part, self._part, self._transit = self._part, None, None
        self.ring = Ring(num_steps=0, max_bytes=1)
        try:
            if part is not None:
                part.abandon()
        except OSError:
            pass  # the same disk
        warnings.warn(
            f"Records cannot be written to `{self._folder}` any more: {error}. Training goes on without them.",
            TrustRLWarning,
            stacklevel=3,
        )
