"""Records back from disk, as tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trustrl.errors import RecordError
from trustrl.packages import need
from trustrl.recording.table import read_table

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
        return _tensor(self.table[name].combine_chunks())

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
    path = Path(path)
    files = sorted(path.glob("step-*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise RecordError(f"`{path}` must be a file of records or a folder with some, got none. See trustrl.recording.")
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


def _tensor(array: Any) -> Tensor:
    pa = need("pyarrow", extra="records")
    if pa.types.is_list(array.type):
        lengths = _tensor(array.value_lengths().fill_null(0)).long()
        values = _tensor(array.flatten())
        out = values.new_full((len(array), int(lengths.max()) if len(array) else 0), _EMPTY[values.dtype])
        out[torch.arange(out.shape[1]) < lengths.unsqueeze(1)] = values
        return out
    if pa.types.is_boolean(array.type):
        return _tensor(array.cast(pa.uint8())).bool()
    dtype = {"float": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}[str(array.type)]
    if array.null_count:
        array = array.fill_null(_EMPTY[dtype])
    if not len(array):
        return torch.empty(0, dtype=dtype)
    values = torch.frombuffer(bytearray(array.buffers()[1]), dtype=dtype)
    return values[array.offset : array.offset + len(array)]
