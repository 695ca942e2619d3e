"""π' on its way from OpenRLHF's actor to its update.

`PolicyModelActor.forward` returns a `RecordedLogp`. The experience maker puts one `AnchorRow` per sequence into
`Experience.mm_train_inputs`: a list of one dictionary per sequence, which only actors of images read, and which every
function that splits, pads, moves, or joins experiences leaves as it is. A tensor field with an axis of K ids does not
survive: OpenRLHF pads the last axis of a row and cuts padding from the first.

Loads without OpenRLHF: the process that makes experiences receives these objects from the process that trains.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.errors import MissingDataError

CARRIED = "trustrl_anchor"
"""The key of an `AnchorRow` in a sequence's dictionary."""


class AnchorRow(NamedTuple):
    """π' at the n tokens of one sequence that are in the loss, inside the kept ids if sampling is truncated."""

    logp: Tensor
    """(n,): log π' of the sampled tokens. OpenRLHF's own is computed from rounded logits in 16 bits."""

    topk_ids: Tensor | None = None
    """(n, K) int32; None if the region reads no top K of π'."""

    topk_logp: Tensor | None = None
    topk_tail_logp: Tensor | None = None
    """(n,): log of the mass outside the K ids and the sampled token."""


@dataclass(frozen=True)
class RecordedLogp:
    """The log-probs that OpenRLHF's actor returns for a rollout, with the anchor's rows."""

    logp: Tensor
    rows: list[AnchorRow]

    def to(self, device: Any) -> "RecordedLogp":
        """Returns the log-probs on a device, as `PolicyModelActor.forward` asks of them. The rows stay on the CPU."""
        return RecordedLogp(self.logp.to(device), self.rows)


def is_read_in_a_rollout(region: Region, *, truncated: bool) -> bool:
    """Returns whether π' is read from the output layer, because OpenRLHF's own log-probs do not suffice."""
    needs = region.needs()
    return truncated or bool(needs.topk and "proximal" in needs.anchors)


def carry(experience: Any, **rows: Sequence[Any] | None) -> None:
    """Puts rows into an `Experience`, one per sequence.

    Args:
        experience: The micro-batch.
        rows: The rows by their key; None for no rows.
    """
    held = {key: column for key, column in rows.items() if column is not None}
    count = len(experience.sequences)
    experience.mm_train_inputs = [{key: column[row] for key, column in held.items()} for row in range(count)]


def rows_under(experience: Any, key: str) -> list[Any]:
    """Returns what each sequence's dictionary has under a key; None for those without."""
    return [inputs.get(key) if isinstance(inputs, dict) else None for inputs in experience.mm_train_inputs or ()]


def carried(experience: Any, lengths: Sequence[int]) -> AnchorRow:
    """Returns the anchor at all tokens in the loss of an `Experience`, sequence by sequence.

    Args:
        experience: The micro-batch.
        lengths: The number of tokens in the loss of each sequence.

    Raises:
        MissingDataError: If a sequence has no row, or one of another length.
    """
    rows: list[AnchorRow | None] = rows_under(experience, CARRIED)
    held = [None if row is None else len(row.logp) for row in rows]
    if held != list(lengths):
        raise MissingDataError(
            f"experience.mm_train_inputs must carry π' at {list(lengths)} tokens, got {held}. Leave "
            "mm_train_inputs, action_mask and the order of sequences as OpenRLHF makes them."
        )
    columns: Iterable[tuple[Any, ...]] = zip(*(row for row in rows if row is not None), strict=True)
    device = experience.sequences.device
    fields: list[Any] = [None if column[0] is None else torch.cat(column).to(device) for column in columns]
    return AnchorRow(*fields)
