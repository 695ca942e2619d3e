"""Memory that a Parquet file takes once it is decoded, computed before it is decoded. No torch.

The footer states values and bytes, and may lie; the header in front of each page states them again, and is what pyarrow
decodes by. So the pages of a local file are walked, without their content, and must agree with the footer.
A dictionary repeats a text without repeating its bytes, so texts are counted by their length times their number.
"""

import io
from typing import Any, NamedTuple

from trustrl import limits
from trustrl.optional_imports import need

SMALL, RATIO = 256_000_000, 64
"""Bytes that a record file may take when decoded, and further ones for each byte of the file. Log-probs hardly
compress: the tables of real runs take 5 to 15 times their file."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
_TEXT = "BYTE_ARRAY"
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7
_HEADER = 4096
"""Bytes that the header of a page usually has at most."""


class Sizes(NamedTuple):
    """Memory in bytes, for pyarrow's tables and for lists of Python objects."""

    arrow: int
    python: int


class _Chunk(NamedTuple):
    """A column chunk by its page headers."""

    values: int
    uncompressed: int
    """Bytes of its pages, uncompressed."""

    longest: int
    """Bytes of the longest text that its dictionary, or a page with shared prefixes, can hold."""


def check_record(file: Any, metadata: Any, size: int) -> None:
    """Checks a record file.

    Raises:
        OSError: If a column occurs twice, or the pages contradict the footer.
        OverLimit: If its values take more memory than its size explains.
    """
    names = metadata.schema.to_arrow_schema().names
    for name in names:
        if names.count(name) > 1:
            raise OSError(f"column {name!r:.80} occurs {names.count(name)} times, and must occur once")
    sizes = decoded_sizes(file, metadata, SMALL + RATIO * size)
    limits.check(sizes.arrow, SMALL + RATIO * size, f"its {metadata.num_rows:,} rows")


def check_rows(file: Any) -> None:
    """Checks a file whose rows are read as Python objects.

    Raises:
        OSError: If the pages contradict the footer.
        OverLimit: If its rows take more memory than allowed.
    """
    parquet = need("pyarrow.parquet", extra="records")
    metadata = parquet.read_metadata(file)
    sizes = decoded_sizes(file, metadata, limits.DECODED)
    limits.check(sizes.python, limits.DECODED, f"its {metadata.num_rows:,} rows")


def decoded_sizes(file: Any, metadata: Any, enough: float) -> Sizes:
    """Returns bounds on the memory that the rows of a file take.

    Args:
        file: The file, open for reading.
        metadata: Its footer.
        enough: Bytes of text above which repeated texts are measured by decoding the dictionary and the indices.

    Raises:
        OSError: If the pages contradict the footer.
    """
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    fixed = python = 0
    texts = [0] * len(leaves)
    largest_page = 0
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        python += group.num_rows * 250
        for index, leaf in enumerate(leaves):
            column = group.column(index)
            chunk = _chunk(file, column) if isinstance(file, io.BufferedIOBase) else _stated(column)
            nested = leaf.max_repetition_level
            width = leaf.length if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS[leaf.physical_type]
            levels = (4 if leaf.max_definition_level else 0) + leaf.max_definition_level // 8
            fixed += chunk.values * (width + 1 + levels + 5 * max(nested - 1, 0)) + 5 * group.num_rows * (nested > 0)
            python += chunk.values * (400 if "." in leaf.path else 100)
            largest_page = max(largest_page, chunk.uncompressed)
            if leaf.physical_type == _TEXT:
                texts[index] += chunk.uncompressed + chunk.values * chunk.longest
    if sum(texts) > enough / 3 and isinstance(file, io.BufferedIOBase):
        limits.check(fixed, 4 * limits.DECODED, f"its {metadata.num_rows:,} rows")
        for index, leaf in enumerate(leaves):
            if leaf.physical_type == _TEXT and texts[index] > enough / 3 / len(leaves):
                texts[index] = min(texts[index], int(_measured(file, leaf.path, enough * limits.factor())))
    text = sum(texts)
    return Sizes(fixed + text + largest_page, fixed + python + 3 * text + largest_page)


def _measured(file: Any, path: str, enough: float) -> float:
    """Returns the bytes of the texts of a column, or `enough` if they are more or cannot be measured.

    Decodes the dictionary and the indices alone.
    """
    pc, parquet = need("pyarrow.compute", extra="records"), need("pyarrow.parquet", extra="records")
    pa, total = need("pyarrow", extra="records"), 0
    file.seek(0)
    with parquet.ParquetFile(file, read_dictionary=[path], pre_buffer=False) as opened:
        for group in range(opened.num_row_groups):  # pyarrow does not join dictionaries inside lists
            try:
                for batch in opened.iter_batches(row_groups=[group], columns=[path], use_threads=False):
                    values = batch.column(0)
                    while not hasattr(values, "dictionary"):
                        values = values.field(0) if hasattr(values, "field") else values.values
                    lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
                    total += pc.sum(lengths).as_py() or 0
            except (pa.ArrowNotImplementedError, OSError):  # OSError: texts with shared prefixes, or damage
                return enough
            if total > enough:
                return enough
    return total


def _stated(column: Any) -> _Chunk:
    """Returns a column chunk as the footer states it."""
    longest = column.total_uncompressed_size if column.has_dictionary_page else 0
    return _Chunk(column.num_values, column.total_uncompressed_size, longest)


def _chunk(file: Any, column: Any) -> _Chunk:
    """Returns a column chunk by its page headers.

    Raises:
        OSError: If they contradict the footer.
    """
    offset = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    end = offset + column.total_compressed_size
    values = uncompressed = longest = 0
    while offset < end and values < column.num_values:
        page, length = _page_header(file, offset)
        kind, size, stored = (page.get(key, 0) for key in (1, 2, 3))
        if not all(isinstance(number, int) and number >= 0 for number in (kind, size, stored)):
            raise OSError("the header of a page is damaged")
        about = page.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0), {})
        if not isinstance(about, dict) or not isinstance(num := about.get(1, 0), int) or num < 0:
            raise OSError("the header of a page is damaged")
        if kind in (_DATA, _DATA_V2):
            values += num
            if about.get(2 if kind == _DATA else 4) == _DELTA_BYTE_ARRAY:
                longest = max(longest, size)
        elif kind == _DICTIONARY:
            longest = max(longest, size)
        uncompressed += length + size
        offset += length + stored
    slack = 65_536 + column.total_uncompressed_size // 8  # some writers do not count the headers of pages
    if values != column.num_values or uncompressed > column.total_uncompressed_size + slack:
        raise OSError(
            f"its pages have {values:,} values and {uncompressed:,} bytes, and its footer states "
            f"{column.num_values:,} and {column.total_uncompressed_size:,}; the file is damaged"
        )
    return _Chunk(values, uncompressed, longest)


def _page_header(file: Any, offset: int) -> tuple[dict[int, Any], int]:
    """Returns the fields of a page header by their numbers, and its length.

    Raises:
        OSError: If it is damaged.
    """
    for size in (_HEADER, 256 * _HEADER):  # statistics may be long
        file.seek(offset)
        data = file.read(size)
        try:
            return _struct(data, 0)
        except (IndexError, RecursionError):
            continue
    raise OSError("the header of a page is damaged")


def _struct(data: bytes, offset: int) -> tuple[dict[int, Any], int]:
    """Returns the fields of a struct in Thrift's compact protocol, and the position after it.

    Reference: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    fields: dict[int, Any] = {}
    number = 0
    while byte := data[offset]:
        offset += 1
        kind, step = byte & 15, byte >> 4
        if step:
            number += step
        else:
            number, offset = _integer(data, offset)
        if kind in (4, 5, 6) and data[offset] < 128:  # a small number, as most are
            value = data[offset]
            fields[number] = (value >> 1) ^ -(value & 1)
            offset += 1
        else:
            fields[number], offset = _value(data, offset, kind)
    return fields, offset + 1


def _value(data: bytes, offset: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true and false
        return kind == 1, offset
    if kind == 3:
        return data[offset], offset + 1
    if kind in (4, 5, 6):
        return _integer(data, offset)
    if kind == 7:
        return None, offset + 8
    if kind == 8:
        length, offset = _varint(data, offset)
        return None, offset + length
    if kind == 12:
        return _struct(data, offset)
    raise IndexError(kind)  # page headers have no lists and maps


def _integer(data: bytes, offset: int) -> tuple[int, int]:
    value, offset = _varint(data, offset)
    return (value >> 1) ^ -(value & 1), offset


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[offset] & 127) << shift
        offset += 1
        if data[offset - 1] < 128 or shift > 63:
            return value, offset
        shift += 7
