"""Line fit of the sampler-trainer gap in recorded tokens, which separates a wrong temperature from wrong weights.

`trustrl probe` tries each mistake on the trainer's logits. Records contain only the log-probs of sampled tokens, so a
line fit replaces that here. At another temperature log μ = β log π' − log Z, so Δ = log π' − log μ is linear in log μ,
up to the variation of Z. Other weights scatter Δ: the fit explains little, or has slope −1 if log π' is unrelated to
log μ.
"""

from dataclasses import dataclass

import torch

from trustrl.errors import MissingPackageError
from trustrl.recording.record_files import parts_in
from trustrl.recording.record_reader import read
from trustrl.tools.explain.evidence import Evidence

FILES = 8
"""Number of record files to read, starting with the first. They show any gap that exists from the start."""

EXPLAINED = 0.5
"""Share of Δ's variance that the line must explain. With rounding or other weights it explains almost none."""

STEEPEST = -0.75
"""Slopes below this indicate unrelated log-probs, whose slope is −1."""

FEWEST = 30
"""Minimum number of tokens for a line fit."""


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


def line_of(run: Evidence) -> GapLine | None:
    """Fits the line to the first records of a run.

    π' is the trainer at the rollout's weights, so all updates of a batch share it.

    Returns:
        None if too few tokens have both log-probs, or if pyarrow is not installed.

    Raises:
        RecordError: If a file cannot be read.
    """
    try:
        parts = [read(file) for file in parts_in(run.records)[:FILES]]
    except MissingPackageError:  # the metrics alone still cover most causes
        return None
    sides = [
        (one["behavior_logp"], one["proximal_logp"]) for one in parts if {"behavior_logp", "proximal_logp"} <= {*one}
    ]
    if not sides:
        return None
    sampler, trainer = (torch.cat(side).double() for side in zip(*sides, strict=True))
    both = sampler.isfinite() & trainer.isfinite()
    x, y = sampler[both], (trainer - sampler)[both]
    if len(x) < FEWEST or not x.var() > 0 or not y.var() > 0:
        return None
    shared = ((x - x.mean()) * (y - y.mean())).sum() / (len(x) - 1)
    return GapLine(float(shared / x.var()), float(shared**2 / (x.var() * y.var())), len(x))
