"""Count of what a recorder could not write, with a warning when it begins and one when it is over. No torch."""

import warnings

from trustrl.errors import TrustRLWarning
from trustrl.recording.storage import Place


class Dropped:
    """Tokens and sequences that a recorder dropped since it last wrote."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._first: int | None = None
        self.last_step = -1
        """The last step that was dropped, or -1."""

        self._num_steps = self._num_tokens = self._num_sequences = 0

    def add(self, step: int, error: Exception, *, num_tokens: int, num_sequences: int) -> None:
        """Counts a step that was not written. Warns if the last one was.

        Args:
            step: The training step.
            error: Why it was not written.
            num_tokens: Rows of the token table that were dropped.
            num_sequences: Rows of the sequence table that were dropped.
        """
        if self._first is None:
            self._first = step
            self._warn(
                f"Cannot write records to `{self._folder}`: {str(error).rstrip('.')}. The records of step {step} and "
                "of the next ones are dropped and counted until writing succeeds; training continues."
            )
        self.last_step = step
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_sequences += num_sequences

    def over(self, step: int | None, *, num_sequences: int = 0) -> None:
        """Warns with the totals if steps were dropped before this one, which was written. None ends the run.

        Args:
            step: The training step.
            num_sequences: Sequences that waited for a later step and are dropped now.
        """
        if self._first is None:
            return
        self._num_sequences += num_sequences
        until = "the run ended" if step is None else f"step {step}, from which on they are written again"
        self._warn(
            f"Records in `{self._folder}` lack {self._num_tokens:,} tokens and {self._num_sequences:,} sequences of "
            f"{self._num_steps:,} steps, {self._first} to {self.last_step}, until {until}."
        )
        self._first = None
        self._num_steps = self._num_tokens = self._num_sequences = 0

    def dump(self, step: int, error: Exception) -> None:
        """Warns that a dump was not written."""
        self._warn(
            f"Cannot write the dump of step {step} to `{self._folder}`: {str(error).rstrip('.')}. The last steps stay "
            "in memory; training continues."
        )

    def _warn(self, text: str) -> None:
        warnings.warn(text, TrustRLWarning, stacklevel=4)
