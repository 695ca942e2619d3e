"""Checksums of a part file: a CRC-32 of each column chunk and of the footer. No torch.

They lie between the last column chunk and the footer, where other programs do not look.
An end (uint64) and a CRC-32 (uint32) for each segment, the CRC-32 of the footer, the number of segments (uint32), and
`MARK`, all little-endian. The segments are contiguous from byte 0. A bit that flips anywhere in the file breaks one of
them, or the length and the mark at its end. Parquet's own checksums cover pages alone, without their headers.
"""

import io
import json
import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import IO, Any

from trustrl.files import parsed_json
from trustrl.limits import OverLimit, factor
from trustrl.optional_imports import need
from trustrl.recording.decoded_size import check_record

MARK = b"trustrl1"
MAGIC = b"PAR1"
LARGEST_FOOTER = 256 * 2**20
"""Bytes of the largest footer. That of a file with 1,000 row groups has about 4 million."""

_SEGMENT, _END, _LENGTH = struct.Struct("<QI"), struct.Struct(f"<II{len(MARK)}s"), struct.Struct("<I4s")
_TAIL = 65_536

_MOST_CHECKED = 10_000
_CHECKED: set[tuple[float, ...]] = set()
"""Files whose pages were walked, by device, inode, time of change, size, footer and the factor on limits."""


def seal(file: IO[bytes]) -> None:
    """Adds the checksums to a complete Parquet file that is open for reading and writing."""
    size, footer = _footer(file)
    metadata = parsed_footer(footer)
    start = size - len(footer)
    columns = (
        metadata.row_group(group).column(i)
        for group in range(metadata.num_row_groups)
        for i in range(metadata.num_columns)
    )
    begins = sorted(
        min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
        for column in columns
        if column.total_compressed_size
    )
    ends = [*begins[1:], start] if begins else [start]
    block, before = b"", 0
    file.seek(0)
    for end in ends:
        block += _SEGMENT.pack(end, zlib.crc32(file.read(end - before)))
        before = end
    file.seek(start)
    file.write(block + _END.pack(zlib.crc32(footer), len(ends), MARK) + footer)


def _footer(file: Any) -> tuple[int, bytes]:
    """Returns the size of a Parquet file and its footer, with the length and the mark at its end.

    Raises:
        OSError: If the file does not end as a Parquet file.
    """
    size, ending = _tail(file, _TAIL)
    length, magic = _LENGTH.unpack(ending[-_LENGTH.size :]) if len(ending) >= _LENGTH.size else (0, b"")
    whole = length + _LENGTH.size
    if magic != MAGIC or length == 0 or whole > size - len(MAGIC) or length > LARGEST_FOOTER:
        raise OSError("it does not end as a Parquet file; it is truncated or damaged")
    return size, ending[-whole:] if whole <= len(ending) else _tail(file, whole)[1]


def _tail(file: Any, num: int) -> tuple[int, bytes]:
    size = file.seek(0, 2)
    file.seek(max(0, size - num))
    return size, file.read(min(size, num))


@lru_cache(maxsize=1)
def parsed_footer(footer: bytes) -> Any:
    """Returns the `pyarrow.parquet.FileMetaData` of a footer."""
    pa, pq = need("pyarrow", extra="records"), need("pyarrow.parquet", extra="records")
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


def checked_file(file: Any) -> tuple[Any, bytes, bool]:
    """Returns a source for `pyarrow.parquet.ParquetFile`, the footer, and True if the file has checksums.

    The source compares each column chunk that it delivers with its checksum.

    Raises:
        OSError: If the file is not Parquet, the footer does not have its checksum, a column occurs twice, or the rows
            would take more memory than the file explains.
    """
    size, footer = _footer(file)
    start = size - len(footer)
    file.seek(max(0, start - _TAIL))
    before = file.read(min(start, _TAIL))
    if len(before) < _END.size or not before.endswith(MARK):
        _check_decoded(file, footer, size)
        return file, footer, False
    crc, num, _ = _END.unpack(before[-_END.size :])
    length = num * _SEGMENT.size + _END.size
    if length > start:
        raise OSError("its checksums are damaged")
    if length > len(before):
        file.seek(start - length)
        before = file.read(length)
    segments = list(_SEGMENT.iter_unpack(before[-length : -_END.size]))
    ends = [end for end, _ in segments]
    if zlib.crc32(footer) != crc or sorted(set(ends)) != ends or ends[-1:] != [start - length]:
        raise OSError("the checksum of its footer is wrong; the file is damaged")
    _check_decoded(file, footer, size)
    return VerifiedFile(file, ends, [segment_crc for _, segment_crc in segments]), footer, True


def _check_decoded(file: Any, footer: bytes, size: int) -> None:
    """Checks the memory that the rows take, once for each file: row groups are read with one opening each."""
    key = None
    if isinstance(file, io.BufferedReader):
        about = os.fstat(file.fileno())
        key = about.st_dev, about.st_ino, about.st_ctime_ns, size, zlib.crc32(footer), factor()
        if key in _CHECKED:
            return
    try:
        check_record(file, parsed_footer(footer), size)
    except OverLimit as error:
        raise OSError(str(error)) from None
    if key is not None:
        if len(_CHECKED) >= _MOST_CHECKED:
            _CHECKED.clear()
        _CHECKED.add(key)


CHECKSUM = "checksum"
"""Key of a JSON file's checksum."""


def sealed_json(data: Mapping[str, Any]) -> str:
    """Returns a JSON file with a checksum."""
    plain = json.loads(json.dumps(data))  # keys as text, as a reader finds them
    return json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1) + "\n"


def checked_json(text: bytes) -> dict[str, Any]:
    """Returns the object in a JSON file. A file without a checksum, as before release 0.2, is not compared.

    Raises:
        ValueError: If the text is not a JSON object, or does not have its checksum.
    """
    data = parsed_json(text)
    if not isinstance(data, dict):
        raise ValueError("no object")
    if CHECKSUM in data and data[CHECKSUM] != _checksum(data):
        raise ValueError(
            f"its checksum is wrong; the file is damaged. If you changed it by hand, remove the key {CHECKSUM}"
        )
    return data


def _checksum(data: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in data.items() if key != CHECKSUM}
    return f"crc32:{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"


class VerifiedFile:
    """File for reading that raises an error instead of delivering bytes that differ from their checksum."""

    def __init__(self, file: Any, ends: list[int], crcs: list[int]) -> None:
        self._file, self._ends, self._crcs = file, ends, crcs
        self._at = 0
        self.closed = False

    def read(self, num: int = -1) -> bytes | memoryview:
        """Returns the next bytes.

        Raises:
            OSError: If the segments that contain them do not have their checksums.
        """
        last = self._ends[-1]
        stop = last if num < 0 else min(self._at + num, last)
        if self._at >= stop:
            return b""
        first = bisect_right(self._ends, self._at)
        begin = self._ends[first - 1] if first else 0
        ends = range(first, bisect_left(self._ends, stop) + 1)
        self._file.seek(begin)
        data = memoryview(self._file.read(self._ends[ends[-1]] - begin))
        before = begin
        for segment in ends:
            if zlib.crc32(data[before - begin : self._ends[segment] - begin]) != self._crcs[segment]:
                raise OSError(
                    f"the checksum of bytes {before:,} to {self._ends[segment]:,} is wrong; the file is damaged"
                )
            before = self._ends[segment]
        chunk = data[self._at - begin : stop - begin]
        self._at = stop
        return chunk

    def seek(self, to: int, whence: int = 0) -> int:
        """Moves to a position and returns it."""
        self._at = to + (0, self._at, self._ends[-1])[whence]
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def writable(self) -> bool:
        """Returns False."""
        return False

    def close(self) -> None:
        """Marks this view as closed. The file behind it stays open."""
        self.closed = True
