"""Writer for part files of tokens: streams row groups into a file that appears when it is complete."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trustrl.optional_imports import need
from trustrl.recording import schema
from trustrl.recording.part_names import PartName
from trustrl.recording.schema import SHARED
from trustrl.recording.storage import Place, WholeFile
from trustrl.recording.token_rows import Rows
from trustrl.recording.writers import Claim

ROWS_PER_GROUP = 65_536
"""Largest row group: about 4 MB in memory, 12 MB with a top-20."""


class PartWriter:
    """Writer for one part file. The file appears under its name only after `close`."""

    def __init__(
        self, folder: Place, *, step: int, rank: int, region: Mapping[str, Any] | None, claim: Claim | None = None
    ) -> None:
        self._path = folder / str(PartName(step, step, rank, 1 if claim is None else claim.attempt))
        self._whole = WholeFile(self._path)
        metadata = schema.metadata("tokens", None if claim is None else claim.metadata) | {
            schema.REGION_KEY: json.dumps(region).encode()
        }
        self._schema = schema.arrow_schema(metadata)
        pq = need("pyarrow.parquet", extra="records")
        try:
            self._file = pq.ParquetWriter(self._whole.target, self._schema, **schema.writing("tokens"))
        except OSError:
            self._whole.abandon()
            raise
        self._waiting: list[Any] = []
        self._num_waiting = 0
        self.num_rows = 0

    def add(self, rows: Rows) -> None:
        """Adds tokens. Writes when a row group is full."""
        self._waiting.append(_batch(rows, self._schema))
        self._num_waiting += len(rows)
        self.num_rows += len(rows)
        if self._num_waiting >= ROWS_PER_GROUP:
            self._flush()

    def close(self, *, num_tokens: int) -> Place:
        """Finishes the file, gives it its name and returns its place.

        Args:
            num_tokens: The number of tokens in the loss of this step and rank, written or not.
        """
        self._flush()
        counts = {"tokens_in_loss": num_tokens, "rows": self.num_rows}
        self._file.add_key_value_metadata({schema.STEP_KEY.decode(): json.dumps(counts)})
        self._file.close()
        self._whole.seal()
        self._whole.publish()
        return self._path

    def abandon(self) -> None:
        """Closes and deletes the unfinished file."""
        try:
            self._file.close()
        finally:
            self._whole.abandon()

    def _flush(self) -> None:
        if self._waiting:
            pa = need("pyarrow", extra="records")
            self._file.write_table(pa.Table.from_batches(self._waiting, self._schema), row_group_size=ROWS_PER_GROUP)
            self._waiting, self._num_waiting = [], 0


def _batch(rows: Rows, fields: Any) -> Any:
    """Returns a record batch that shares the tensors' memory."""
    pa = need("pyarrow", extra="records")
    num, arrays = len(rows), []
    for field in fields:
        if field.name in SHARED:
            arrays.append(_array(pa, torch.full((num,), getattr(rows, field.name), dtype=torch.int32), field.type))
        elif field.name == "kept_ids" and field.name in rows.columns:
            arrays.append(_without_padding(pa, rows.columns[field.name]))
        elif field.name in rows.columns:
            arrays.append(_array(pa, rows.columns[field.name], field.type))
        else:
            arrays.append(pa.nulls(num, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


def _array(pa: Any, x: Tensor, kind: Any) -> Any:
    if pa.types.is_list(kind):
        offsets = torch.arange(0, x.numel() + 1, x.shape[1], dtype=torch.int32)
        return pa.ListArray.from_arrays(_array(pa, offsets, pa.int32()), _array(pa, x.reshape(-1), kind.value_type))
    if pa.types.is_boolean(kind):
        return _array(pa, x.to(torch.uint8), pa.uint8()).cast(kind)
    x = x.contiguous()
    return pa.Array.from_buffers(kind, len(x), [None, pa.foreign_buffer(x.data_ptr(), x.nbytes, base=x)])


def _without_padding(pa: Any, ids: Tensor) -> Any:
    """Returns rows of ids as lists of different lengths; ids below 0 are padding."""
    there = ids >= 0
    ends = torch.nn.functional.pad(there.sum(-1).cumsum(0), (1, 0)).int()
    return pa.ListArray.from_arrays(_array(pa, ends, pa.int32()), _array(pa, ids[there].int(), pa.int32()))
