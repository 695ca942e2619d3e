"""What a file of records holds: one row per token in the loss and update; see docs/reference/records.md."""

from dataclasses import dataclass
from typing import Any, Literal

from trustrl.packages import need

VERSION = 1
"""Of this table. A column that is added, dropped or means something else makes a new version."""

VERSION_KEY, REGION_KEY, STEP_KEY = b"trustrl.schema_version", b"trustrl.region", b"trustrl.step"
"""In the file's metadata: the version, the region's settings (JSON), what was left off (JSON)."""

Kind = Literal["int32", "int64", "float32", "bool", "list<int32>", "list<float32>"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    name: str
    kind: Kind
    meaning: str
    nullable: bool = True
    """True where not every region, engine or setting has it: then it is null in the whole file."""


COLUMNS = (
    Column("step", "int32", "training step, as the engine counts it", nullable=False),
    Column("update", "int32", "optimiser step inside the training step, from 0", nullable=False),
    Column("rank", "int32", "of the process that trained on the token", nullable=False),
    Column("sequence", "int64", "names the sequence: the same at every update, unique in the run", nullable=False),
    Column(
        "position", "int32", "of the token in its completion, from 0; tokens outside the loss count", nullable=False
    ),
    Column("token_id", "int32", "a_t"),
    Column("advantage", "float32", "A_t, times the trainer's own importance weight where it has one", nullable=False),
    Column("behavior_logp", "float32", "log μ(a_t), the sampler's"),
    Column("proximal_logp", "float32", "log π'(a_t), the trainer's at the rollout weights"),
    Column("policy_logp", "float32", "log π(a_t) at this update", nullable=False),
    Column("weight", "float32", "w_t, which the region multiplies the gradient with", nullable=False),
    Column("kept", "bool", "M_t: false where the region stopped the gradient", nullable=False),
    Column("divergence_lower", "float32", "lower end of D_t, in the statistic's unit"),
    Column("divergence_upper", "float32", "upper end of D_t"),
    Column("entropy", "float32", "of π at this position, nats"),
    Column("sampler_version", "int32", "of the weights that sampled the token"),
    Column("topk_ids", "list<int32>", "the anchor's most probable ids; below 0 is an empty place"),
    Column("topk_logp", "list<float32>", "the anchor's log-probs there"),
)
"""Every column, in the order of the file."""

SHARED = ("step", "update", "rank")
"""Columns that all tokens of a micro-batch have in common; in memory they are held once."""

_BYTES = {"int32": 4, "int64": 8, "float32": 4, "bool": 1, "list<int32>": 4, "list<float32>": 4}


def bytes_per_token(topk: int) -> int:
    """The most a recorded token takes in host memory, with so many ids of a top-K; 0 where none is recorded."""
    return sum(_BYTES[c.kind] * (topk if c.kind.startswith("list") else 1) for c in COLUMNS if c.name not in SHARED)


def arrow_schema(metadata: dict[bytes, bytes] | None = None) -> Any:
    """The table as pyarrow describes it.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    pa = need("pyarrow", extra="records")
    types = {
        "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(), "bool": pa.bool_(),
        "list<int32>": pa.list_(pa.int32()), "list<float32>": pa.list_(pa.float32()),
    }  # fmt: skip
    return pa.schema([pa.field(c.name, types[c.kind], nullable=c.nullable) for c in COLUMNS], metadata=metadata)
