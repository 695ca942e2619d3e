"""Sampler-trainer gap in recorded tokens: a line fit that separates a wrong temperature from wrong weights, and classes
of tokens by their share of the gap (probability, position, id, turn and age).

`trustrl probe` tries each mistake on the trainer's logits. Records contain only the log-probs of sampled tokens, so a
line fit replaces that here. At another temperature log μ = β log π' − log Z, so Δ = log π' − log μ is linear in log μ,
up to the variation of Z. Other weights scatter Δ: the fit explains little, or has slope −1 if log π' is unrelated to
log μ.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trustrl.core.metrics import PROBABILITY_EDGES
from trustrl.errors import MissingPackageError
from trustrl.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

FILES = 8
"""Number of record files to read a row group of: the first ones for a gap from the start, the last if it grew."""

EXPLAINED = 0.5
"""Share of Δ's variance that the line must explain. With rounding or other weights it explains almost none."""

STEEPEST = -0.75
"""Slopes below this indicate unrelated log-probs, whose slope is −1."""

FEWEST = 30
"""Minimum number of tokens for a line fit."""

COLUMNS = ("behavior_logp", "proximal_logp", "token_id", "position", "turn", "sampler_version")
READ = ("step", *COLUMNS)

FIRST_STEPS = 128
"""Steps whose tokens count as those from the start."""

POSITION_EDGES = (1, 4, 16, 64, 256, 1024)

FIRST_TOKEN = f"below {POSITION_EDGES[0]}"

FIRST_CARRY, FIRST_TOKENS = 0.8, 0.2
"""Least share of the gap, and largest share of the tokens, at which the first tokens show another prompt."""

IDS = 5
"""Number of token ids to name, largest share of the gap first."""

MOST = 0.5
"""Share of the gap that one class must carry to be named in a reason."""

LIFT = 2.0
"""Smallest factor between a class's share of the gap and its share of the tokens."""

NO_RECORDS = "Without token records, the tokens that carry the gap are unknown."


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
    from trustrl.recording.record_files import part_files, read_table

    files = [file for folder in run.records for file in part_files(folder)]
    if not files:
        return None
    from torch import cat

    from trustrl.recording.record_reader import Records

    try:
        group = -1 if newest else 0
        parts = [Records(*read_table(file, READ, [group])) for file in (files[-FILES:] if newest else files[:FILES])]
    except MissingPackageError:  # the metrics alone still cover most causes
        return None
    parts = [part for part in parts if {"behavior_logp", "proximal_logp"} <= {*part}]
    if not parts:
        return None
    shared = [name for name in COLUMNS if all(name in part for part in parts)]
    columns = {name: cat([part[name] for part in parts]) for name in shared}
    both = columns["behavior_logp"].isfinite() & columns["proximal_logp"].isfinite()
    if not newest:  # a merged file goes on to later steps
        steps = cat([part["step"] for part in parts])
        both &= steps < steps[:1] + FIRST_STEPS
    return {name: column[both] for name, column in columns.items()} if both.any() else None


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


@dataclass(frozen=True, slots=True)
class GapClass:
    """Tokens of one class, with their share of the sum of |log π' − log μ|."""

    by: str
    """Kind of class: "probability", "position", "token id", "turn" or "age"."""

    name: str
    tokens: int
    token_share: float
    gap_share: float
    mean: float
    """Mean |Δ| in nats."""


def classes_of(tokens: "Mapping[str, Tensor] | None") -> list[GapClass]:
    """Returns every class that has tokens, by kind. The list is empty without recorded tokens or without a gap."""
    if tokens is None:
        return []
    gap = (tokens["proximal_logp"].double() - tokens["behavior_logp"].double()).abs()
    whole = float(gap.sum())
    if not whole > 0:
        return []
    classes: list[GapClass] = []
    for by, names, index in _kinds(tokens):
        counts = index.bincount(minlength=len(names)).tolist()
        sums = index.bincount(gap, minlength=len(names)).tolist()
        kind = [
            GapClass(by, name, count, count / len(gap), carried / whole, carried / count)
            for name, count, carried in zip(names, counts, sums, strict=True)
            if count
        ]
        classes += sorted(kind, key=lambda group: -group.gap_share)[:IDS] if by == "token id" else kind
    return classes


def at_the_start(tokens: "Mapping[str, Tensor] | None") -> GapClass | None:
    """Returns the first tokens of completions if they carry most of the gap, as after another prompt, else None."""
    first = [x for x in classes_of(tokens) if x.by == "position" and x.name == FIRST_TOKEN]
    carries = first and first[0].gap_share >= FIRST_CARRY and first[0].token_share <= FIRST_TOKENS
    return first[0] if carries else None


def sentence_of(tokens: "Mapping[str, Tensor] | None") -> str:
    """Returns the class that carries most of the gap as a sentence, or the fact that none does."""
    if tokens is None:
        return NO_RECORDS
    most = [x for x in classes_of(tokens) if x.gap_share >= MOST and x.gap_share >= LIFT * x.token_share]
    if not most:
        return "No class of tokens (probability, position, id, turn, age) carries most of the gap."
    largest = max(most, key=lambda group: group.gap_share - group.token_share)
    return (
        f"Tokens with {largest.by} {largest.name} carry {largest.gap_share:.0%} of the gap and are "
        f"{largest.token_share:.0%} of the tokens."
    )


def _kinds(tokens: "Mapping[str, Tensor]") -> "Iterator[tuple[str, list[str], Tensor]]":
    """Yields each kind, the names of its classes, and the class of every token."""
    yield "probability", *_bins(tokens["behavior_logp"].double().exp(), PROBABILITY_EDGES)
    if "position" in tokens:
        yield "position", *_bins(tokens["position"], POSITION_EDGES)
    columns = {"token id": tokens.get("token_id"), "turn": tokens.get("turn")}
    if "sampler_version" in tokens:
        columns["age"] = tokens["sampler_version"].max() - tokens["sampler_version"]
    for by, column in columns.items():
        if column is not None:
            values, index = column.unique(return_inverse=True)
            if len(values) > 1:  # one value is all tokens
                yield by, [str(value) for value in values.tolist()], index


def _bins(column: "Tensor", edges: Sequence[float]) -> "tuple[list[str], Tensor]":
    """Returns the names of the bins between the edges, and the bin of every token. The first and last are open."""
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    names = [f"below {edges[0]:g}", *inner, f"{edges[-1]:g} or more"]
    limits = column.double().new_tensor(list(edges))
    return names, (column.double().unsqueeze(1) >= limits).sum(1)
