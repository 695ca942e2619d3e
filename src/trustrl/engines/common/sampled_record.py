"""One typed record of the tokens that a sampler drew for one request, whatever the sampler.

Each field says in its `Column` what it means, who fills it, and its bytes per token. `SampledRecord.fields()` returns
these descriptions.

Samplers create records, so this module imports neither torch nor an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import numpy as np

from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.sampler_fields import KEPT_COUNTS, KEPT_IDS, TOPK_IDS, TOPK_LOGP
from trustrl.errors import EngineError

UNKNOWN = -1
"""The version of weights that nobody numbered, and the id at places that truncation left empty."""


def version_number(name: Any) -> int:
    """Returns the number that a sampler's name of its weights is; `UNKNOWN` for other names."""
    text = str(name)
    return int(text) if text.isdecimal() else UNKNOWN


class Column(NamedTuple):
    """Description of one field of a record."""

    shape: str
    """T: tokens, K: most probable ids, n: kept ids of all tokens, E: layers × experts per token."""

    meaning: str
    """The distribution that a number belongs to: temperature, truncation, dtype."""

    filled_by: str
    """The part of the system that knows the value."""

    size: str
    """Bytes per token."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SampledRecord:
    """Records of the T tokens that one request sampled. Nothing here carries a gradient.

    μ is the distribution that each token was drawn from: after penalties, biases, the temperature and truncation
    (top-p, top-k, min-p), and renormalized over the ids that truncation kept. Greedy sampling has no such distribution;
    its μ is the model's own at temperature 1.
    """

    tokens: Annotated[
        np.ndarray,
        Column("(T,) int32", "The sampled ids. An aborted request has those drawn before it ended.", "sampler", "4"),
    ]
    logp: Annotated[
        np.ndarray,
        Column("(T,) float32", "log μ of the sampled id.", "sampler", "4"),
    ]
    topk_ids: Annotated[
        np.ndarray,
        Column("(T, K) int32", f"The K most probable ids under μ, by rank. {UNKNOWN} beyond the kept ids, or any "
               "removed id there.", "sampler", "4 K"),
    ]  # fmt: skip
    topk_logp: Annotated[
        np.ndarray,
        Column("(T, K) float32", "log μ of these ids; −inf where truncation removed the id.", "sampler", "4 K"),
    ]
    kept: Annotated[
        KeptColumn | None,
        Column("(n,) uint16 or int32, (T,) int32", "The ids that truncation kept, in any order, and their number at "
               "each token. Ids take 2 bytes if all are below 65,536. A number above the request's limit means that "
               "ids are missing. None if they were not asked for.",
               "sampler, or trustrl's plugin in it", "2 or 4 n / T, + 4"),
    ] = None  # fmt: skip
    version: Annotated[
        np.ndarray | None,
        Column("(T,) int32", f"The version of the weights that drew each token; {UNKNOWN} if unknown. None if the "
               "sampler reports none.", "sampler, from the version that the weight update named", "4"),
    ] = None  # fmt: skip
    experts: Annotated[
        np.ndarray | None,
        Column("(T, E) int16", "The experts behind each log-prob, layer by layer. None for dense models.", "sampler",
               "2 E"),
    ] = None  # fmt: skip
    turn: Annotated[
        int,
        Column("number", "The number of the request in its sequence, from 0.", "agent loop", "0"),
    ] = 0
    replica: Annotated[
        str | None,
        Column("name", "The server that sampled the tokens; None if unknown.", "client that chose the server", "0"),
    ] = None
    is_complete: Annotated[
        bool,
        Column("flag", "False if the request has not ended by itself: aborted, or still running.", "sampler", "0"),
    ] = True

    def __post_init__(self) -> None:
        lengths = {
            "logp": self.logp, "topk_ids": self.topk_ids, "topk_logp": self.topk_logp, "version": self.version,
            "experts": self.experts, "kept.counts": None if self.kept is None else self.kept.counts,
        }  # fmt: skip
        wrong = {name: len(x) for name, x in lengths.items() if x is not None and len(x) != len(self.tokens)}
        if wrong:
            name, length = next(iter(wrong.items()))
            raise EngineError(
                f"The sampler must return {name} for each of {len(self.tokens)} tokens, got {length} rows. Install a "
                "release of the sampler that trustrl's documentation lists."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def fields(cls) -> Mapping[str, Column]:
        """Returns the description of each field, in order."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    def of(self, *, turn: int, replica: str | None) -> Self:
        """Returns the record with what only the agent loop and the client know."""
        return replace(self, turn=turn, replica=replica)

    def extra_fields(self) -> dict[str, np.ndarray]:
        """Returns the columns that trainers carry next to their own tokens and log-probs; empty if there are none."""
        fields: dict[str, Any] = {}
        if self.topk_ids.shape[1]:
            fields = {TOPK_IDS: self.topk_ids, TOPK_LOGP: self.topk_logp}
        return fields if self.kept is None else {**fields, KEPT_IDS: self.kept.ids, KEPT_COUNTS: self.kept.counts}
