"""CRC-32C (Castagnoli), which TensorBoard stores with each record, and its mask.

Reference: RFC 3720, appendix B.4
"""

from array import array


def _table() -> array:
    table = array("I")
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Returns the checksum.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked(value: int) -> int:
    """Returns the checksum as TFRecord files store it: rotated by 15 bits, plus a constant."""
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF
