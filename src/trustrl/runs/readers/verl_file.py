"""verl's file logger: one JSON object with `step` and `data` per line (trainer.logger=["file"])."""

from pathlib import Path

from trustrl.files import parsed_json
from trustrl.runs.part import Part
from trustrl.runs.points import Points, step_number
from trustrl.runs.readers.files import Fault, Files, json_lines, opening

NAME = "verl file logger"
LOOKS_FOR = "*.jsonl with step and data, the file of VERL_FILE_LOGGER_PATH"


def read(files: Files) -> list[Part]:
    """Returns a part for each log in the folder or up to two levels below, the longest first.

    verl truncates the file when a run is resumed, so several files may belong to one run.
    """
    parts = [_read(files, file) for file in files.matching("*.jsonl", "*/*.jsonl", "*/*/*.jsonl") if is_log(file)]
    return sorted(parts, key=lambda part: -part.size)


def is_log(file: Path) -> bool:
    """Returns True if the first line is one that verl's file logger writes."""
    first, end, _ = opening(file).partition(b"\n")
    if not first.startswith(b'{"step":') or b'"data":' not in first[:64]:
        return False
    try:
        return not end or isinstance(parsed_json(first)["data"], dict)
    except (ValueError, KeyError):
        return True  # a damaged line of a log


def _read(files: Files, file: Path) -> Part:
    short = files.short(file)
    part, points = Part(source=NAME, engine="verl"), Points()
    for line in json_lines(file, short):
        if isinstance(line, Fault):
            part.faults.append(line.text)
            continue
        line_number, entry = line
        step = step_number(entry.get("step")) if isinstance(entry, dict) else None
        data = entry.get("data") if isinstance(entry, dict) else None
        if step is None or not isinstance(data, dict):
            part.faults.append(f"{short}, line {line_number}: not an object with step and data; left out")
            continue
        points.add(step, data)
    part.take(points, short)
    return part
