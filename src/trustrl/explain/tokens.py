"""What recorded tokens say about a gap between sampler and trainer.

`trustrl probe` tries each mistake on the trainer's logits. Records hold the sampled tokens' log-probs only, so here a
line must do. At another temperature log μ = β log π' − log Z, so Δ = log π' − log μ lies along a line over log μ, up to
what Z varies by. Other weights scatter: Δ has no line, or one of slope −1 where log π' has nothing to do with log μ.
"""

from dataclasses import dataclass

import torch

from trustrl.errors import MissingPackageError
from trustrl.explain.evidence import Evidence
from trustrl.recording.files import parts_in
from trustrl.recording.reading import read

FILES = 8
"""Files of records that are read, from the first on: a gap that was there from the start shows in them."""

EXPLAINED = 0.5
"""Share of Δ's variance that the line must explain. Rounding and other weights explain next to none."""

STEEPEST = -0.75
"""A slope below it is that of log-probs that have nothing to do with each other, which is −1."""

FEWEST = 30
"""Tokens below which a line says nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """Δ over log μ."""

    slope: float
    explained: float
    """Share of Δ's variance: the squared correlation."""

    tokens: int

    @property
    def is_temperature(self) -> bool:
        """Whether one temperature would draw it."""
        return self.explained >= EXPLAINED and self.slope > STEEPEST


def line_of(run: Evidence) -> Line | None:
    """The line through a run's first records; None without enough tokens of both sides, or without pyarrow.

    π' is the trainer at the rollout's weights, so all updates of a batch have the same.

    Raises:
        RecordError: a file cannot be read.
    """
    try:
        parts = [read(file) for file in parts_in(run.records)[:FILES]]
    except MissingPackageError:  # the metrics still tell most of it
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
    return Line(float(shared / x.var()), float(shared**2 / (x.var() * y.var())), len(x))
