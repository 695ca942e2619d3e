"""Protocol buffers on the wire: the fields of a message, without its definition.

Reference: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Value = int | bytes


def fields(message: bytes) -> Iterator[tuple[int, int, Value]]:
    r"""Yields the number, kind and value of each field. Fixed-width values are bytes.

    Example:
        >>> list(fields(b"\x08\x96\x01\x12\x02hi"))
        [(1, 0, 150), (2, 2, b'hi')]
    """
    offset, end = 0, len(message)
    while offset < end:
        key, offset = varint(message, offset)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("a field has number 0")
        if kind == VARINT:
            value, offset = varint(message, offset)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, offset = varint(message, offset)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if size < 0 or offset + size > end:
            raise ValueError("a field is truncated or of an unknown kind")
        yield number, kind, message[offset : offset + size]
        offset += size


def varint(message: bytes, offset: int) -> tuple[int, int]:
    """Returns an integer of variable length, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(message):
            raise ValueError("an integer is truncated")
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, offset
    raise ValueError("an integer is too long")


def signed(value: Value) -> int:
    """Returns a 64-bit integer with its sign."""
    if not isinstance(value, int):
        raise ValueError("a field is not an integer")
    return value - (1 << 64) if value >> 63 else value


def raw(value: Value) -> bytes:
    """Returns the bytes of a field."""
    if not isinstance(value, bytes):
        raise ValueError("a field is not a string of bytes")
    return value


def text(value: Value) -> str:
    """Returns a string.

    Raises:
        ValueError: If the field is not a string in UTF-8.
    """
    return raw(value).decode("utf-8")


def double(value: Value) -> float:
    """Returns a floating-point number of 4 or 8 bytes."""
    content = raw(value)
    if len(content) not in (4, 8):
        raise ValueError("a number has neither 4 nor 8 bytes")
    return struct.unpack("<f" if len(content) == 4 else "<d", content)[0]
