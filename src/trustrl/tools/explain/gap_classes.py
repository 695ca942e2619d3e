"""Classes of recorded tokens by their share of the sampler-trainer gap: probability, position, id, turn and age."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trustrl.core.metrics import PROBABILITY_EDGES

if TYPE_CHECKING:
    from torch import Tensor

POSITION_EDGES = (1, 4, 16, 64, 256, 1024)

IDS = 5
"""Number of token ids to name, largest share of the gap first."""

MOST = 0.5
"""Share of the gap that one class must carry to be named in a reason."""

LIFT = 2.0
"""Smallest factor between a class's share of the gap and its share of the tokens."""

NO_RECORDS = "Without token records, the tokens that carry the gap are unknown."


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

    @property
    def carries_most(self) -> bool:
        """True if this class carries most of the gap, and far more than its share of the tokens."""
        return self.gap_share >= MOST and self.gap_share >= LIFT * self.token_share

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl explain --json` prints."""
        return asdict(self)


def classes_of(tokens: "Mapping[str, Tensor] | None") -> list[GapClass]:
    """Returns every class that has tokens, by kind. The list is empty without recorded tokens or without a gap."""
    if tokens is None:
        return []
    gap = (tokens["proximal_logp"].double() - tokens["behavior_logp"].double()).abs()
    whole = float(gap.sum())
    if not whole > 0:
        return []
    found: list[GapClass] = []
    for by, names, index in _kinds(tokens):
        counts = index.bincount(minlength=len(names)).tolist()
        sums = index.bincount(gap, minlength=len(names)).tolist()
        kind = [
            GapClass(by, name, count, count / len(gap), carried / whole, carried / count)
            for name, count, carried in zip(names, counts, sums, strict=True)
            if count
        ]
        found += sorted(kind, key=lambda one: -one.gap_share)[:IDS] if by == "token id" else kind
    return found


def sentence_of(tokens: "Mapping[str, Tensor] | None") -> str:
    """Returns the class that carries most of the gap as a sentence, or the fact that none does."""
    if tokens is None:
        return NO_RECORDS
    most = [one for one in classes_of(tokens) if one.carries_most]
    if not most:
        return "No class of tokens (probability, position, id, turn, age) carries most of the gap."
    one = max(most, key=lambda one: one.gap_share - one.token_share)
    return (
        f"Tokens with {one.by} {one.name} carry {one.gap_share:.0%} of the gap and are {one.token_share:.0%} of the "
        "tokens."
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
