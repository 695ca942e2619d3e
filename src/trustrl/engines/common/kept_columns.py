"""The ids that truncated sampling kept, as a ragged column: 2 or 4 bytes per kept id and 4 per token.

Samplers create columns, so this module imports neither torch nor an engine.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trustrl.errors import EngineError, MissingDataError


class KeptColumn(NamedTuple):
    """Kept ids of one sequence."""

    ids: np.ndarray
    """(n,) int32, or uint16 after `narrow`: the kept ids of all tokens, one token after the other."""

    counts: np.ndarray
    """(T,) int32: the number of kept ids at each token; 0 where no token was sampled."""

    def only(self, mask: np.ndarray) -> "KeptColumn":
        """Returns the column of the tokens on which a mask is True. The mask may be shorter or longer."""
        chosen = np.zeros(len(self.counts), bool)
        chosen[: len(mask)] = mask[: len(chosen)]
        return KeptColumn(self.ids[np.repeat(chosen, self.counts)], self.counts[chosen])

    def narrow(self) -> "KeptColumn":
        """Returns the column with ids of 2 bytes, if all are small enough, as those of a vocabulary of 65,536 are."""
        fits = self.ids.max(initial=0) <= np.iinfo(np.uint16).max
        return KeptColumn(self.ids.astype(np.uint16) if fits else self.ids, self.counts)

    def rows(self) -> list[np.ndarray]:
        """Returns the kept ids of each token."""
        return np.split(self.ids, np.cumsum(self.counts)[:-1]) if len(self.counts) else []


def column_of(rows: Sequence[Any]) -> KeptColumn:
    """Returns the column of one sequence from the kept ids at each token."""
    arrays = [np.asarray(row, np.int32) for row in rows]
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return KeptColumn(ids, np.array([len(row) for row in arrays], np.int32))


def check_limit(column: KeptColumn, max_kept: int) -> None:
    """Raises if a token has more kept ids than are recorded.

    Args:
        column: The column.
        max_kept: The largest number. Samplers return one more if there are more.
    """
    over = int((column.counts > max_kept).sum())
    if over:
        raise EngineError(
            f"Truncated sampling must keep at most {max_kept:,} ids at each token, got more at {over} of "
            f"{len(column.counts)} tokens. Raise max_kept: a kept id costs 4 bytes in the record, and a sampler on a "
            f"GPU reserves 8 (max_kept + 2) bytes for each token, {8 * (max_kept + 2):,} now. Or sample with a smaller "
            "top_p, with top_k, or with a larger min_p."
        )


def require_kept(columns: Sequence[KeptColumn], in_loss: np.ndarray, advice: str) -> None:
    """Raises if a token in the loss has no kept ids.

    Args:
        columns: One column per sequence.
        in_loss: (B, T), True on tokens in the loss.
        advice: What to do, as full sentences.
    """
    for row, (column, mask) in enumerate(zip(columns, in_loss, strict=True)):
        counts = np.zeros(mask.shape, np.int32)
        length = min(len(mask), len(column.counts))
        counts[:length] = column.counts[:length]
        missing = int((mask & (counts == 0)).sum())
        if missing:
            raise MissingDataError(
                "The sampler must record the ids that top-p, top-k, or min-p kept at each token, got none at "
                f"{missing} tokens of sequence {row}. {advice}"
            )
