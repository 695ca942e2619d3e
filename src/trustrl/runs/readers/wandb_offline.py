"""W&B runs as wandb stores them locally: `run-<id>.wandb`. Needs neither wandb nor an account.

Format: a header of 7 bytes, then a LevelDB log (blocks of 32 KiB; CRC-32, length and type before each piece), each
record a protocol buffer of wandb's `Record`.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trustrl.files import open_regular, parsed_json
from trustrl.limits import Meter, OverLimit
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.points import Points, step_number
from trustrl.runs.readers import wire
from trustrl.runs.readers.files import Fault, Files, chosen_file

NAME = "W&B offline run"
LOOKS_FOR = "run-*.wandb"

BLOCK = 32_768
_HEADER = b":W&B"
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _SUMMARY, _CONFIG, _RUN, _EXIT = 2, 3, 5, 17, 18
LARGEST_RECORD = 16_000_000
"""Bytes of a record above which it counts as damaged."""

LONGEST_NAME = 1_000
"""Characters of the longest name of a metric, with the names of the objects around it."""

STEPS = ("train/global_step", "training/global_step", "_step")
"""Keys that hold the step, by preference. `_step` counts calls of `log`, which TRL makes several times in one step."""


def read(files: Files) -> list[Part]:
    """Returns the W&B run of a folder.

    Raises:
        ConfigError: If the folder has several.
    """
    patterns = [f"{'*/' * depth}run-*.wandb" for depth in range(5)]
    file = chosen_file(files, files.matching(*patterns), "W&B runs")
    if file is None:
        return []
    part, run = Part(source=NAME), _Run(files.short(file))
    for record in records(file, files.short(file)):
        try:
            if isinstance(record, Fault):
                part.faults.append(record.text)
            else:
                run.take(record)
        except OverLimit:
            raise
        except ValueError as error:
            part.faults.append(f"{files.short(file)}: a record is damaged ({error}); left out")
    part.name = run.name
    part.take(by_step(run.history), files.short(file))
    engine, part.settings = settings_of(run.config)
    if engine:
        part.engine = part.engine or engine
        part.found.append(f"settings in the configuration stored in {files.short(file)}")
    if run.exit_code is not None:
        part.status = "failed" if run.exit_code else "finished"
    return [part]


def by_step(history: list[dict[str, Any]]) -> Points:
    """Returns the metrics by step. Rows that lack the preferred key for the step get it from the rows around them."""
    points = Points()
    key = next((key for key in STEPS if any(step_number(row.get(key)) is not None for row in history)), None)
    last = 0
    for index, row in enumerate(history):
        own = step_number(row.get(key)) if key else index
        last = last if own is None else own
        points.add(last, {name: value for name, value in row.items() if name not in STEPS and name[:1] != "_"})
    return points


class _Run:
    """History, configuration and end of a run."""

    def __init__(self, short: str) -> None:
        self._meter = Meter(f"{short}: its history")
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.name: str | None = None
        self.exit_code: int | None = None

    def take(self, record: bytes) -> None:
        """Adds a record.

        Raises:
            ValueError: If the record is damaged.
        """
        for number, _, value in wire.fields(record):
            if number == _HISTORY:
                self.history.append(_history(wire.raw(value)))
                self._meter.add(200 + sum(100 + len(name) for name in self.history[-1]))
            elif number == _CONFIG:
                self._configure(wire.raw(value))
            elif number == _RUN:
                self._start(wire.raw(value))
            elif number == _EXIT:
                codes = [wire.signed(code) for number, _, code in wire.fields(wire.raw(value)) if number == 1]
                self.exit_code = codes[-1] if codes else 0

    def _configure(self, data: bytes) -> None:
        self._meter.add(len(data))
        self.config |= _items(data, 1)

    def _start(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            if number == 4:
                self._configure(wire.raw(value))
            elif number == 8:
                self.name = wire.text(value)


def _history(data: bytes) -> dict[str, Any]:
    """Returns the metrics of a HistoryRecord; nested keys are joined with a slash. Other values are left out."""
    metrics = {
        name: value for name, value in _items(data, 1).items() if value is None or isinstance(value, (int, float))
    }
    for number, _, value in wire.fields(data):
        if number == 2:
            steps = [wire.signed(step) for number, _, step in wire.fields(wire.raw(value)) if number == 1]
            metrics.setdefault("_step", steps[-1] if steps else 0)
    return metrics


def _items(data: bytes, field: int) -> dict[str, Any]:
    """Returns key and value of each item: key is field 1, nested_key field 2, value_json field 16, numbers 5 and 6."""
    items: dict[str, Any] = {}
    for number, _, value in wire.fields(data):
        if number != field:
            continue
        keys, payload = list[str](), None
        for part, kind, content in wire.fields(wire.raw(value)):
            if part in (1, 2):
                keys.append(wire.text(content))
            elif part == 16:
                payload = _parsed(wire.text(content))
            elif part == 5 and kind == wire.VARINT:
                payload = wire.signed(content)
            elif part == 6:
                payload = wire.double(content)
        for key, inner in _leaves("/".join(filter(None, keys)), payload):
            items[key] = inner
    return items


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers inside a nested value. wandb stores nested metrics and settings as JSON objects."""
    if len(key) > LONGEST_NAME:
        raise ValueError(f"a name has more than {LONGEST_NAME:,} characters")
    if isinstance(value, dict) and "_type" not in value:
        for name, inner in value.items():
            yield from _leaves(f"{key}/{name}", inner)
    else:
        yield key, value


def _parsed(text: str) -> Any:
    try:
        value = parsed_json(text)
    except OverLimit:
        raise
    except ValueError:
        return None
    return (
        {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.get(value, value)
        if isinstance(value, str)
        else value
    )


def records(file: Path, short: str) -> Iterator[bytes | Fault]:
    """Yields the records of a log, and a fault for each damaged part. Continues at the next block after damage."""
    try:
        with open_regular(file) as opened:
            kept: list[bytes] = []
            offset = size = 0
            while block := opened.read(BLOCK):
                start = 7 if offset == 0 else 0
                if offset == 0 and not block.startswith(_HEADER):
                    yield Fault(f"{short}: not a W&B log; left out")
                    return
                for piece in _pieces(block, start, f"{short}: the block at byte {offset:,}"):
                    if isinstance(piece, Fault):
                        yield piece
                        kept = []
                        continue
                    kind, data = piece
                    if kind in (_FULL, _FIRST):
                        kept, size = [data], 0
                    elif kept:
                        kept.append(data)
                    size += len(data)
                    if size > LARGEST_RECORD:
                        yield Fault(f"{short}: a record is larger than {LARGEST_RECORD:,} bytes; left out")
                        kept, size = [], 0
                    if kind in (_FULL, _LAST) and kept:
                        yield b"".join(kept)
                        kept = []
                offset += len(block)
            if kept:
                yield Fault(f"{short}: the last record is truncated; left out")
            if offset == 0:
                yield Fault(f"{short}: empty")
    except OSError as error:
        yield Fault(f"{short}: {error.strerror}; left out")


def _pieces(block: bytes, offset: int, where: str) -> Iterator[tuple[int, bytes] | Fault]:
    """Yields kind and data of each piece in a block; ends at the first that is damaged."""
    while offset + 7 <= len(block):
        check, size, kind = struct.unpack_from("<IHB", block, offset)
        if kind == 0 and size == 0 and check == 0:
            return  # padding
        data = block[offset + 7 : offset + 7 + size]
        if len(data) < size:
            yield Fault(f"{where} is truncated; the rest of it is left out")
            return
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(block[offset + 6 : offset + 7 + size]) != check:
            yield Fault(f"{where} has a wrong checksum at {offset:,}; the rest of it is left out")
            return
        yield kind, data
        offset += 7 + size
    if offset < len(block) < BLOCK:
        yield Fault(f"{where} is truncated; the rest of it is left out")
