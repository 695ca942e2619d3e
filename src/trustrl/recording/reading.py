"""Records back from disk, as tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trustrl.errors import RecordError
from trustrl.packages import need
from trustrl.recording.parquet import part_files, read_table

_EMPTY = {torch.float32: float("nan"), torch.int32: -1, torch.int64: -1, torch.bool: False}


class Records(Mapping[str, Tensor]):
    """Columns by name, one entry per token and update; columns that no token has are not there.

    A top-K column is (N, K), with −1 and NaN where a token has fewer ids.
    """

    def __init__(self, table: Any, region: dict[str, Any]) -> None:
        self.table = table
        """The pyarrow table itself, for `.to_pandas()`, DuckDB or Polars."""

        self.region = region
        """The region's settings, as `trustrl.config_from_dict` reads them."""

        self._names = [name for name in table.column_names if table[name].null_count < len(table)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return tensor_of(self.table[name].combine_chunks())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: str | Path) -> Records:
    """The records in a file, or in all part files of a folder (dumps are folders of their own), by step and rank.

    Raises:
        RecordError: there are none, a file is not of ours, of a newer trustrl, or of another region than the others.
        MissingPackageError: pyarrow is not installed.
    """
    pa = need("pyarrow", extra="records")
    files = part_files(path)
    tables, regions = [], []
    for file in files:
        table, region = read_table(file)
        tables.append(table)
        regions.append(region)
    for file, region in zip(files, regions, strict=True):
        if region != regions[0]:
            raise RecordError(
                f"All files must be of one region, got {regions[0]} in `{files[0].name}` and {region} in "
                f"`{file.name}`. Read them one by one."
            )
    return Records(pa.concat_tables(tables), regions[0])


def tensor_of(array: Any) -> Tensor:
    """An arrow array as a tensor; −1, NaN or False where it is null, and in the empty places of a list."""
    pa = need("pyarrow", extra="records")
    if pa.types.is_list(array.type):
        lengths = tensor_of(array.value_lengths().fill_null(0)).long()
        values = tensor_of(array.flatten())
        out = values.new_full((len(array), int(lengths.max()) if len(array) else 0), _EMPTY[values.dtype])
        out[torch.arange(out.shape[1]) < lengths.unsqueeze(1)] = values
        return out
    if pa.types.is_boolean(array.type):
        return tensor_of(array.cast(pa.uint8())).bool()
    dtype = {"float": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}[str(array.type)]
    if array.null_count:
        array = array.fill_null(_EMPTY[dtype])
    if not len(array):
        return torch.empty(0, dtype=dtype)
    values = torch.frombuffer(bytearray(array.buffers()[1]), dtype=dtype)
    return values[array.offset : array.offset + len(array)]
