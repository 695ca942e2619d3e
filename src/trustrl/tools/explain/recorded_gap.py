"""Sampler-trainer gap in recorded tokens, and a line fit that separates a wrong temperature from wrong weights.

`trustrl probe` tries each mistake on the trainer's logits. Records contain only the log-probs of sampled tokens, so a
line fit replaces that here. At another temperature log μ = β log π' − log Z, so Δ = log π' − log μ is linear in log μ,
up to the variation of Z. Other weights scatter Δ: the fit explains little, or has slope −1 if log π' is unrelated to
log μ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trustrl.errors import MissingPackageError
from trustrl.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

FILES = 8
"""Number of record files to read: the first ones for a gap from the start, the last ones for one that grew."""

EXPLAINED = 0.5
"""Share of Δ's variance that the line must explain. With rounding or other weights it explains almost none."""

STEEPEST = -0.75
"""Slopes below this indicate unrelated log-probs, whose slope is −1."""

FEWEST = 30
"""Minimum number of tokens for a line fit."""

COLUMNS = ("behavior_logp", "proximal_logp", "token_id", "position", "turn", "sampler_version")


@dataclass(frozen=True, slots=True)
class GapLine:
    """Line fit of Δ over log μ."""

    slope: float
    explained: float
    """Share of Δ's variance that the line explains: the squared correlation."""

    tokens: int

    @property
    def is_temperature(self) -> bool:
        """True if another temperature explains the line."""
        return self.explained >= EXPLAINED and self.slope > STEEPEST


def tokens_of(run: Run, *, newest: bool = False) -> "Mapping[str, Tensor] | None":
    """Returns the recorded tokens for which both sampler and trainer are known, by column.

    π' is the trainer at the rollout's weights, so all updates of a batch share it.

    Args:
        run: The run.
        newest: True for the last record files instead of the first.

    Returns:
        None if no token has both log-probs, or if pyarrow is not installed.

    Raises:
        RecordError: If a file cannot be read.
    """
    from torch import cat

    from trustrl.recording.record_files import part_files
    from trustrl.recording.record_reader import read

    files = [file for folder in run.records for file in part_files(folder)]
    try:
        parts = [read(file) for file in (files[-FILES:] if newest else files[:FILES])]
    except MissingPackageError:  # the metrics alone still cover most causes
        return None
    parts = [one for one in parts if {"behavior_logp", "proximal_logp"} <= {*one}]
    if not parts:
        return None
    shared = [name for name in COLUMNS if all(name in part for part in parts)]
    found = {name: cat([part[name] for part in parts]) for name in shared}
    both = found["behavior_logp"].isfinite() & found["proximal_logp"].isfinite()
    return {name: column[both] for name, column in found.items()} if both.any() else None


def line_of(tokens: "Mapping[str, Tensor] | None") -> GapLine | None:
    """Fits the line, or returns None if there are too few tokens or nothing varies."""
    if tokens is None:
        return None
    x = tokens["behavior_logp"].double()
    y = tokens["proximal_logp"].double() - x
    if len(x) < FEWEST or not x.var() > 0 or not y.var() > 0:
        return None
    shared = ((x - x.mean()) * (y - y.mean())).sum() / (len(x) - 1)
    return GapLine(float(shared / x.var()), float(shared**2 / (x.var() * y.var())), len(x))
