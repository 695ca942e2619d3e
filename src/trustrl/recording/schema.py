"""Columns of the three tables of a record. docs/specification/token-record.md is the specification.

Tokens: one row per token in the loss and update. Sequences: one row per sampled sequence and step. Texts: the prompt
and completion of these sequences, in separate files, so that a record can be shared without them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trustrl.optional_imports import need

VERSION = 5
"""Version of the specification. Adding or dropping a column, or changing its meaning, increments it."""

VERSION_KEY, REGION_KEY, STEP_KEY = b"trustrl.schema_version", b"trustrl.region", b"trustrl.step"
"""Keys of the file's metadata: schema version, region settings (JSON), and token counts of the step (JSON)."""

TABLE_KEY = b"trustrl.table"
"""Key of the file's metadata since version 3: the name of the table, one of `TABLES`."""

WRITER_KEY, PARTS_KEY = b"trustrl.writer", b"trustrl.parts"
"""Keys of the file's metadata since version 5: the process that wrote it, and the steps of a merged file (JSON)."""

Kind = Literal[
    "int32", "int64", "float32", "bool", "string", "list<int16>", "list<int32>", "list<float32>", "map<string, float32>"
]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    name: str
    kind: Kind
    meaning: str
    nullable: bool = True
    """True if some regions, engines or settings lack the column."""

    since: int = 1
    """The schema version that added the column. Files of an older version lack it."""


COLUMNS = (
    Column("step", "int32", "training step, as the engine counts it", nullable=False),
    Column("update", "int32", "optimizer step inside the training step, from 0", nullable=False),
    Column("rank", "int32", "rank of the process that trained on the token", nullable=False),
    Column("sequence", "int64", "id of the sequence: the same at every update, unique in the run", nullable=False),
    Column(
        "position",
        "int32",
        "index of the token in its completion, from 0, tokens outside the loss included",
        nullable=False,
    ),
    Column("token_id", "int32", "a_t"),
    Column("advantage", "float32", "A_t, times the trainer's own importance weight if it has one", nullable=False),
    Column("behavior_logp", "float32", "log μ(a_t), recorded by the sampler"),
    Column("proximal_logp", "float32", "log π'(a_t), the trainer's at the rollout weights"),
    Column("policy_logp", "float32", "log π(a_t) at this update", nullable=False),
    Column("weight", "float32", "w_t, the region's factor on the gradient; null without a region"),
    Column("kept", "bool", "M_t: false if the region masks the token's gradient; null without a region"),
    Column("divergence_lower", "float32", "lower end of D_t, in the statistic's unit"),
    Column("divergence_upper", "float32", "upper end of D_t"),
    Column("entropy", "float32", "entropy of π at this position, in nats"),
    Column("sampler_version", "int32", "version of the weights that sampled the token"),
    Column("turn", "int32", "number of the request that sampled the token, from 0", since=2),
    Column("topk_ids", "list<int32>", "the anchor's most probable ids; negative ids are padding"),
    Column("topk_logp", "list<float32>", "the anchor's log-probs at these ids"),
    Column("topk_tail", "float32", "log of the anchor's mass outside these ids and a_t", since=3),
    Column("kept_ids", "list<int32>", "the ids that top-p, top-k or min-p left to sample from", since=2),
    Column("experts", "list<int16>", "the sampler's routed experts behind log μ(a_t), layer by layer", since=2),
)
"""Columns of the token table, in file order. A nullable column has a value in all rows of a file or in none."""

SEQUENCE_COLUMNS = (
    Column("step", "int32", "training step, as the engine counts it", nullable=False, since=3),
    Column("rank", "int32", "rank of the process that trained on the sequence", nullable=False, since=3),
    Column("sequence", "int64", "id of the sequence, as in the token table", nullable=False, since=3),
    Column("group", "int64", "equal for completions of one prompt in one batch", since=3),
    Column("task_id", "string", "name of the task or data set that the prompt comes from", since=3),
    Column("prompt_tokens", "int32", "number of tokens in the prompt", since=3),
    Column("completion_tokens", "int32", "number of tokens in the completion", since=3),
    Column("reward", "float32", "total reward", since=3),
    Column("rewards", "map<string, float32>", "reward by component", since=3),
    Column("advantage", "float32", "advantage of the sequence, if its tokens share one", since=3),
    Column("stop_reason", "string", "reason why sampling ended, as the engine names it", since=3),
    Column("text", "string", "name of the file in texts/ that holds prompt and completion", since=3),
    Column("replica", "string", "address or rank of the sampler's replica that drew the sequence", since=4),
)
"""Columns of the sequence table, in file order. A null is an unknown value."""

TEXT_COLUMNS = (
    Column("sequence", "int64", "id of the sequence, as in the token table", nullable=False, since=3),
    Column("prompt", "string", "prompt as text", since=3),
    Column("completion", "string", "completion as text", since=3),
)
"""Columns of the text table, in file order."""

TABLES = {"tokens": COLUMNS, "sequences": SEQUENCE_COLUMNS, "texts": TEXT_COLUMNS}
"""Columns by table."""

SHARED = ("step", "update", "rank")
"""Columns with one value for all tokens of a micro-batch. Memory holds that value once."""

_BYTES = {"int32": 4, "int64": 8, "float32": 4, "bool": 1, "list<int16>": 2, "list<int32>": 4, "list<float32>": 4}


def bytes_per_token(topk: int, experts: int = 0, kept: int = 0) -> int:
    """Returns the largest host memory a recorded token can take, in bytes.

    Args:
        topk: The number of ids; 0 without a top-K.
        experts: The number of layers times the number of experts per token; 0 without routed experts.
        kept: The largest kept set of a micro-batch; 0 without kept ids.
    """
    entries = {"topk_ids": topk, "topk_logp": topk, "topk_tail": min(topk, 1), "experts": experts, "kept_ids": kept}
    return sum(_BYTES[c.kind] * entries.get(c.name, 1) for c in COLUMNS if c.name not in SHARED)


def metadata(table: str, writer: Mapping[str, Any] | None = None) -> dict[bytes, bytes]:
    """Returns the metadata that files of every table have.

    Args:
        table: Name of the table.
        writer: The process that writes the file, or None if it is unknown.
    """
    plain = {VERSION_KEY: str(VERSION).encode(), TABLE_KEY: table.encode()}
    return plain if writer is None else plain | {WRITER_KEY: json.dumps(writer).encode()}


def writing(table: str) -> dict[str, Any]:
    """Returns the settings of a `pyarrow.parquet.ParquetWriter` for files of a table."""
    usual: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    if table != "tokens":
        return usual
    few = ["step", "update", "rank", "sequence", "advantage", "sampler_version"]
    return usual | {
        "use_dictionary": few,  # few distinct values; zstd compresses other floats better after byte-stream split
        "use_byte_stream_split": [c.name for c in COLUMNS if c.kind == "float32" and c.name not in few],
        "write_statistics": ["step", "update", "rank", "sequence"],
    }


def arrow_schema(metadata: dict[bytes, bytes] | None = None, table: str = "tokens") -> Any:
    """Returns a table's columns as a `pyarrow.Schema`.

    Raises:
        MissingPackageError: If pyarrow is not installed.
    """
    pa = need("pyarrow", extra="records")
    types = {
        "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(), "bool": pa.bool_(), "string": pa.string(),
        "list<int16>": pa.list_(pa.int16()), "list<int32>": pa.list_(pa.int32()),
        "list<float32>": pa.list_(pa.float32()), "map<string, float32>": pa.map_(pa.string(), pa.float32()),
    }  # fmt: skip
    return pa.schema([pa.field(c.name, types[c.kind], nullable=c.nullable) for c in TABLES[table]], metadata=metadata)
