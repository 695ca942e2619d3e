"""TensorBoard event files: scalars, and the arguments that transformers stores as text. Needs no TensorBoard.

Format: TFRecords (length, masked CRC-32C, data, masked CRC-32C), each an Event protocol buffer.
"""

import struct
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import open_regular, parsed_json
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.points import LARGEST_STEP, Points
from trustrl.runs.readers import wire
from trustrl.runs.readers.files import Fault, Files

NAME = "TensorBoard events"
LOOKS_FOR = "events.out.tfevents.*"

LARGEST_RECORD = 64_000_000
"""Bytes of a record above which its length counts as damaged."""

CHECKED = 65_536
"""Bytes up to which the data's checksum is verified. Larger records are images or histograms, which are not read."""

_FLOAT, _DOUBLE = 1, 2
_ARGUMENTS = "args/text_summary"


def read(files: Files) -> list[Part]:
    """Returns the run of a folder. Event files of one folder, or of TRL's `runs`, belong to one run.

    Raises:
        ConfigError: If the folder has several runs.
    """
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in files.matching(*(f"{'*/' * depth}*tfevents*" for depth in range(6))):
        folders[file.parent].append(file)
    if not folders:
        return []
    trainer = bool(files.matching("trainer_state.json", "checkpoint-*/*", "completions/*"))
    if len(folders) > 1 and not (trainer and all("runs" in folder.relative_to(files.root).parts for folder in folders)):
        names = ", ".join(files.short(folder) for folder in sorted(folders)[:5])
        raise ConfigError(
            f"RUN must be one run, got {files.root}, which has TensorBoard events of {len(folders)}. Pass one of them: "
            f"{names}."
        )
    part, points = Part(source=NAME), Points()
    events = sorted(file for group in folders.values() for file in group)
    arguments: str | None = None
    for file in sorted(events, key=lambda file: file.name):  # the name begins with the time of the start
        for event in scalars(file, files.short(file)):
            if isinstance(event, Fault):
                part.faults.append(event.text)
            elif isinstance(event[2], str):
                arguments = event[2] if event[1] == _ARGUMENTS else arguments
            else:
                points.add(event[0], {event[1]: event[2]})
    part.take(points, "TensorBoard events")
    if arguments is not None:
        _settings(part, arguments)
    return [part]


def _settings(part: Part, text: str) -> None:
    """Adds the arguments of TRL's trainer, which it stores as JSON."""
    try:
        arguments = parsed_json(text)
    except ValueError:
        part.faults.append("TensorBoard events: the trainer's arguments are not valid JSON; left out")
        return
    engine, part.settings = settings_of(arguments) if isinstance(arguments, dict) else (None, {})
    if engine:
        part.engine = engine
        part.found.append("settings in the arguments stored with the TensorBoard events")


def scalars(file: Path, short: str) -> Iterator[tuple[int, str, float | str] | Fault]:
    """Yields step, tag and value of each scalar or text, and a fault for each damaged record.

    A damaged length ends the file, because the next record cannot be found.
    """
    try:
        with open_regular(file) as opened:
            offset, count = 0, 0
            while header := opened.read(12):
                if len(header) < 12:
                    yield Fault(f"{short}: truncated after {count:,} records")
                    return
                size, check = struct.unpack("<QI", header)
                if masked(crc32c(header[:8])) != check or size > LARGEST_RECORD:
                    yield Fault(f"{short}: damaged at byte {offset:,}, after {count:,} records; the rest is left out")
                    return
                data, end = opened.read(size), opened.read(4)
                if len(data) < size or len(end) < 4:
                    yield Fault(f"{short}: truncated after {count:,} records")
                    return
                if size <= CHECKED and masked(crc32c(data)) != struct.unpack("<I", end)[0]:
                    yield Fault(f"{short}: the record at byte {offset:,} has a wrong checksum; left out")
                elif size <= CHECKED:
                    yield from _event(data, short, offset)
                offset += 16 + size
                count += 1
            if offset == 0:
                yield Fault(f"{short}: empty")
    except OSError as error:
        yield Fault(f"{short}: {error.strerror}; left out")


def _event(data: bytes, short: str, offset: int) -> Iterator[tuple[int, str, float | str] | Fault]:
    """Yields the values of one Event: step is field 2, summary is field 5 with values in field 1."""
    try:
        step, summaries = 0, list[bytes]()
        for number, _, value in wire.fields(data):
            if number == 2:
                step = wire.signed(value)
            elif number == 5:
                summaries.append(wire.raw(value))
        pairs = [pair for summary in summaries for number, _, value in wire.fields(summary) if number == 1
                 for pair in _value(wire.raw(value))]  # fmt: skip
    except ValueError as error:
        yield Fault(f"{short}: the record at byte {offset:,} is damaged ({error}); left out")
        return
    if 0 <= step < LARGEST_STEP:
        yield from ((step, tag, value) for tag, value in pairs)


def _value(data: bytes) -> Iterator[tuple[str, float | str]]:
    """Yields tag and value of a Summary.Value: tag is field 1, simple_value field 2, tensor field 8."""
    tag, content = "", None
    for number, kind, value in wire.fields(data):
        if number == 1:
            tag = wire.text(value)
        elif number == 2 and kind == wire.FIXED32:
            content = wire.double(value)
        elif number == 8:
            content = _tensor(wire.raw(value))
    if tag and content is not None:
        yield tag, content


def _tensor(data: bytes) -> float | str | None:
    """Returns a scalar or a text of a TensorProto, or None if it is anything else."""
    kind, chunks = 0, list[Any]()
    for number, _, value in wire.fields(data):
        if number == 1:
            kind = wire.signed(value)
        elif number in (4, 5, 6):  # tensor_content, float_val, double_val
            chunks.append(wire.raw(value))
        elif number == 8:  # string_val
            return wire.raw(value).decode("utf-8", errors="replace")
    if len(chunks) == 1 and kind in (_FLOAT, _DOUBLE) and len(chunks[0]) == (4 if kind == _FLOAT else 8):
        return wire.double(chunks[0])
    return None


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
    """Returns the CRC-32C (Castagnoli) of the data. Reference: RFC 3720, appendix B.4.

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
