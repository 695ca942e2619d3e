"""Damage behind valid checksums: contents are mutated, checksums repaired, and the answer compared with the format's own reader.

    python -m fuzz.repaired --cases 20000 --seed 1 --out docs/data/fuzz_repaired.json

pyarrow, sqlite3, torch and json are always the other readers; tensorboard and wandb where they are installed. Our reader
may refuse or leave out with a sentence what the other reads. It must not differ in silence.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from support.hostile_files import leveldb_log
from support.run_files import unpacked
from support.run_folders import sealed, write_groups

SECONDS = 60
"""Time after which a case counts as hanging. The slowest takes a tenth of a second on a free core."""

MEMORY = 3_000_000_000
FAULTS = ("traceback", "hang", "died", "difference")
EXPECTED = ("same", "said", "refused", "more", "aborts")
"""`more`: a protocol buffer is damaged in fields that ours does not read, and the other reader refuses all of it.
`aborts`: pyarrow ends the process. The command line reads in a child process, and says that it ended."""


class Different(Exception):
    """Our answer is another one than the format's own reader gives, and nothing was said."""


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Returns the bytes with a few changes that parsers mind."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        if not out:
            break
        place, how = draw.randrange(len(out)), draw.random()
        if how < 0.3:
            out[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif how < 0.5:
            out[place:place] = b"\xff" * draw.choice((1, 9, 11))
        elif how < 0.65:
            del out[place : place + draw.randrange(1, 9)]
        elif how < 0.8:
            other = draw.randrange(len(out))
            out[place:place] = out[other : other + draw.randrange(64)]
        else:
            out[place] ^= 1 << draw.randrange(8)
    return bytes(out)


def _some_mutated(records: list[bytes], draw: random.Random) -> list[bytes]:
    records = list(records)
    for _ in range(draw.choice((1, 3, 10))):
        index = draw.randrange(len(records))
        records[index] = mutated(records[index], draw)
    if draw.random() < 0.2:
        draw.shuffle(records)
    return records


def _same(ours: Any, theirs: Any) -> bool:
    """Returns True for equal values; NaN equals NaN, and 1 does not equal True."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    return type(ours) is type(theirs) and ours == theirs


def _compare(ours: Any, theirs: Any, what: str) -> None:
    if not _same(ours, theirs):
        raise Different(f"{what}: ours {str(ours)[:1500]}, theirs {str(theirs)[:1500]}")


# TensorBoard


def _events(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.runs.open_run import open_run
    from trustrl.runs.readers.tensorboard import _event, crc32c, masked, scalars

    data, place, records = source.read_bytes(), 0, list[bytes]()
    while place + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        records.append(data[place + 12 : place + 12 + size])
        place += 16 + size
    records = _some_mutated(records, draw)
    file = work / source.name
    with file.open("wb") as out:
        for record in records:
            header = struct.pack("<Q", len(record))
            out.write(
                header + struct.pack("<I", masked(crc32c(header))) + record + struct.pack("<I", masked(crc32c(record)))
            )
    open_run(work)
    whole = [item for item in scalars(file, "f") if isinstance(item, tuple)]
    by_record = [list(_event(record, "f", 0)) for record in records]
    _compare(
        whole, [item for items in by_record for item in items if isinstance(item, tuple)], "a file and its records"
    )
    kinds = {_same_event(record, items) for record, items in zip(records, by_record, strict=True)}
    return next(kind for kind in ("said", "more", "same") if kind in {*kinds, "same"})


def _same_event(record: bytes, ours: list[Any]) -> str:
    """Compares one event with what tensorboard reads."""
    said = any(not isinstance(item, tuple) for item in ours)
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return "said" if said else "same"
    try:
        event = Event.FromString(record)
    except DecodeError:
        return "said" if said else "more"
    if said:
        return "said"
    theirs = []
    for value in event.summary.value if event.HasField("summary") and 0 <= event.step < 2**53 else ():
        content = _scalar(value)
        if value.tag and content is not None:
            theirs.append((event.step, value.tag, content))
    _compare(ours, theirs, "scalars")
    return "same"


def _scalar(value: Any) -> float | str | None:
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if tensor.string_val:
        return tensor.string_val[0].decode("utf-8", errors="replace")
    sizes = {1: ("<f", tensor.float_val), 2: ("<d", tensor.double_val)}
    if tensor.dtype not in sizes:
        return None
    form, values = sizes[tensor.dtype]
    if len(tensor.tensor_content) == struct.calcsize(form) and not values:
        return struct.unpack(form, tensor.tensor_content)[0]
    return values[0] if len(values) == 1 and not tensor.tensor_content else None


# W&B


def _wandb(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.errors import TrustRLError
    from trustrl.runs.open_run import open_run
    from trustrl.runs.readers import wandb_offline

    whole = [record for record in wandb_offline.records(source, "f") if isinstance(record, bytes)]
    mutants = _some_mutated(whole, draw)
    file = work / "run-a.wandb"
    file.write_bytes(leveldb_log(mutants))
    said, more = False, False
    try:
        said = bool(open_run(file).faults)
    except TrustRLError:
        said = True
    read = [record for record in wandb_offline.records(file, "f") if isinstance(record, bytes)]
    if read != mutants:
        raise Different("the records are not those that were written")
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        return "said" if said else "same"
    for record in mutants:
        ours = wandb_offline._Run("f")
        try:
            ours.take(record)
        except ValueError:
            continue  # named in the faults
        try:
            theirs = Record.FromString(record)
        except DecodeError:
            more = more or bool(ours.history)
            continue
        if theirs.HasField("history") and len(ours.history) == 1:
            _compare(ours.history[0], _history(theirs.history), "history")
    return "said" if said else "more" if more else "same"


def _history(history: Any) -> dict[str, Any]:
    from trustrl.runs.readers.wandb_offline import _leaves, _parsed

    items: dict[str, Any] = {}
    for item in history.item:
        key = "/".join(filter(None, [*([item.key] if item.key else []), *item.nested_key]))
        items |= dict(_leaves(key, _parsed(item.value_json) if item.value_json else None))
    items = {name: value for name, value in items.items() if value is None or isinstance(value, (int, float))}
    if history.HasField("step"):
        items.setdefault("_step", history.step.num)
    return items


# Parquet


def _changed_pages(file: Path, draw: random.Random) -> None:
    """Writes the file again without checksums of pages, and changes bytes of pages, page headers or the footer."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        table, own = opened.read(), opened.metadata.metadata or {}
    metadata = {
        **(table.schema.metadata or {}),
        **{key: value for key, value in own.items() if key.startswith(b"trustrl")},
    }
    table = table.replace_schema_metadata(metadata)
    if draw.random() < 0.2:
        table = table.append_column(table.schema.field(0), table.column(0))
    pq.write_table(
        table, file, compression=draw.choice(("none", "none", "snappy", "zstd")), use_dictionary=draw.random() < 0.7,
        data_page_version=draw.choice(("1.0", "2.0")), row_group_size=draw.choice((2, 1000)),
    )  # fmt: skip
    data = bytearray(file.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(draw.choice((0, 1, 1, 2))):
        start, stop = (4, footer) if draw.random() < 0.8 else (footer, len(data) - 8)
        data[draw.randrange(start, stop)] = draw.choice((0, 1, 2, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    file.write_bytes(data)


def _their_table(file: Path) -> Any:
    """Returns pyarrow's table, or None if it refuses."""
    import pyarrow.parquet as pq

    from trustrl.runs.readers.trl_completions import DAMAGE

    try:
        with pq.ParquetFile(io.BytesIO(file.read_bytes()), pre_buffer=False) as opened:
            return opened.read(use_threads=False)
    except DAMAGE:
        return None


def _completions(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.runs.open_run import open_run
    from trustrl.runs.readers import trl_completions

    file = work / source.name
    file.write_bytes(source.read_bytes())
    _changed_pages(file, draw)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = trl_completions._rows(file)
        try:
            list(open_run(file).completions())
        except ValueError:
            return "refused"
    if said:
        return "said"
    theirs = _their_table(file)
    _compare(ours, None if theirs is None else theirs.to_pylist(), "rows")
    return "same"


def _record(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.errors import RecordError, TrustRLWarning
    from trustrl.recording.record_check import check_record
    from trustrl.recording.record_files import read_table
    from trustrl.recording.record_reader import stream

    file = work / source.name
    file.write_bytes(source.read_bytes())
    _changed_pages(file, draw)
    if _aborts_pyarrow(file):
        return "aborts"
    try:
        sealed(file)
    except Exception:  # the footer cannot be read any more
        return "refused"
    valid = check_record(file).is_valid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)
        try:
            ours, _ = read_table(file)
            tokens = sum(len(piece) for piece in stream(file))
        except RecordError:
            if valid:
                raise Different("`records check` accepts what the reader refuses") from None
            return "refused"
    theirs = _their_table(file)
    if theirs is None:
        raise Different("pyarrow refuses what ours reads")
    for name in ours.column_names:
        if name in theirs.column_names and not _same(ours[name].to_pylist(), theirs[name].to_pylist()):
            raise Different(f"column {name}")
    if tokens != len(theirs):
        raise Different(f"{tokens} tokens, pyarrow reads {len(theirs)}")
    return "same"


def _aborts_pyarrow(file: Path) -> bool:
    """Returns True if pyarrow ends the process that looks at the file's footer."""
    import pyarrow.parquet as pq

    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(BaseException):
            metadata = pq.read_metadata(file)
            for group, column in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
                metadata.row_group(group).column(column).to_dict()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT


# SQLite

_VALUES = (
    None, b"\xff\x00", 1e308, -1e308, float("inf"), 2**62, "\x00\x1b[2J", "[[[[", '{"a":' * 50, "NaN", -5, "x" * 10**5,
    '{"step":{"x":1e999}}', '[1]', '"s"', "٣", 0.5, b"{}", '{"reward": NaN, "loss": 1' + "0" * 400 + "}",
)  # fmt: skip


def _database(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.errors import TrustRLError
    from trustrl.runs.open_run import open_run
    from trustrl.runs.readers import sqlite_files

    file = work / source.name
    file.write_bytes(source.read_bytes())
    tables = {
        "metrics": None,
        "configs": ("run_name", "config"),
        "params": ("key", "value"),
        "runs": ("run_uuid", "name", "status"),
    }
    names = sorted(set(tables) & sqlite_files.tables(file))
    database = sqlite3.connect(file)
    for _ in range(draw.choice((1, 1, 3))):
        name = draw.choice(names)
        column = draw.choice([row[1] for row in database.execute(f"pragma table_info({name})")] or ["x"])
        how, value = draw.random(), draw.choice(_VALUES)
        try:
            if how < 0.6:
                rows = f"select rowid from {name} order by abs(rowid * {draw.randrange(99)} % 7) limit 3"
                database.execute(f'update {name} set "{column}" = ? where rowid in ({rows})', (value,))
            elif how < 0.7:
                database.execute(f'alter table {name} rename column "{column}" to zz')
            elif how < 0.75:
                database.execute(f"insert into {name} select * from {name}")
            elif how < 0.85:
                database.execute(f"alter table {name} rename to old_{name}")
                database.execute(f"create view {name} as select * from old_{name}")
            elif how < 0.9:
                database.execute(f"delete from {name}")
            elif how < 0.95:
                database.execute(
                    f'create index i{draw.randrange(9)} on {name} ("{column}") where "{column}" is not null'
                )
            else:
                database.execute(f'alter table {name} add column g{draw.randrange(9)} as (hex("{column}"))')
            database.commit()
        except sqlite3.Error:
            database.rollback()
    database.close()
    said = False
    try:
        opened = open_run(file)
        said = bool(opened.faults)
    except TrustRLError:
        said = True
    first = names[0]
    columns = tables[first] or (
        ("run_name", "step", "metrics") if "configs" in names else ("key", "value", "step", "is_nan")
    )
    try:
        with sqlite_files.opened(file) as ours:
            mine = list(ours.rows(first, columns))
    except (TrustRLError, *sqlite_files.DAMAGE):
        return "refused" if said else "same"  # the run has no such table any more, or another is read
    with sqlite3.connect(file) as plain:
        _compare(mine, plain.execute(f"select {', '.join(columns)} from {first}").fetchall(), first)
    plain.close()
    return "said" if said else "same"


# torch.save


def _dump(source: Path, work: Path, draw: random.Random) -> str:
    import torch

    from trustrl.runs.open_run import open_run

    content = zipfile.ZipFile(io.BytesIO(source.read_bytes()))
    file = work / "1.pt"
    chosen = draw.choice(["data.pkl", "data.pkl", "data.pkl", "data/0", "data/1"])
    with zipfile.ZipFile(file, "w", draw.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as archive:
        for entry in content.infolist():
            data = content.read(entry)
            archive.writestr(entry.filename, mutated(data, draw) if entry.filename.endswith(chosen) else data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = list(open_run(file).completions())
    if said:
        return "said"
    dump = torch.load(file, map_location="cpu", weights_only=True)
    theirs = [sample for sample in dump["samples"] if isinstance(sample, dict)]
    if len(ours) != len(theirs):
        raise Different(f"{len(ours)} samples of {len(theirs)}")
    for mine, sample in zip(ours, theirs, strict=True):
        tokens = sample.get("tokens")
        tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
        if mine.token_ids is not None:
            _compare(mine.token_ids, tuple(map(int, tokens[-len(mine.token_ids) :])), "tokens")
    return "same"


# JSON

_JSON = (
    None, True, -1, 0, 2**53, 2**63, 10**25, 1e308, 5e-324, float("nan"), float("inf"), [], {}, [[[]]], "", "\x1b]0;x\x07",
    "\ud800", "1e999", "a" * 70_000, {"step": {"step": 1}}, "NaN", [1e400], 1.5, "٣",
)  # fmt: skip


def _changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        return {**value, key: _changed(value[key], draw)} if draw.random() < 0.9 else {**value, "": draw.choice(_JSON)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        index = draw.randrange(len(value))
        return [*value[:index], _changed(value[index], draw), *value[index + 1 :]]
    return draw.choice(_JSON)


def _json_lines(source: Path, work: Path, draw: random.Random) -> str:
    from trustrl.errors import TrustRLError
    from trustrl.runs.open_run import open_run
    from trustrl.runs.readers.files import Fault, json_lines

    lines = source.read_text().splitlines()
    for _ in range(draw.choice((1, 2, 5))):
        index, how = draw.randrange(len(lines)), draw.random()
        if how < 0.7:
            try:
                lines[index] = json.dumps(_changed(json.loads(lines[index]), draw))
            except ValueError:
                continue
        elif how < 0.8:
            lines.insert(index, lines[index])
        else:
            lines[index] = mutated(lines[index].encode(), draw).decode("latin-1")
    file = work / source.name
    file.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
    said = False
    try:
        said = bool(open_run(file).faults)
    except TrustRLError:
        said = True
    for line in json_lines(file, "f"):
        if isinstance(line, Fault):
            continue
        raw = file.read_bytes().split(b"\n")[line[0] - 1]
        _compare(line[1], json.loads(raw, parse_int=lambda text: int(text) if len(text) < 21 else float(text)), "line")
    return "said" if said else "same"


FORMATS = {
    "events": _events, "wandb": _wandb, "completions": _completions, "record": _record, "trackio": _database,
    "mlflow": _database, "dump": _dump, "json lines": _json_lines,
}  # fmt: skip


def sources(folder: Path) -> dict[str, Path]:
    """Writes the undamaged files, and returns them by format."""
    import torch

    for name in ("trl-1.16.0", "wandb-0.31.0", "trackio-0.43.0", "mlflow-3.17.2", "verl-0.9.1"):
        unpacked(name, folder / name)
    groups = write_groups(folder / "records", {"1+1=": [1.0, 0.0], "2+2=": [0.5, 1.0]})
    sample = {
        "group_index": 3, "prompt": "1+1=", "tokens": torch.tensor([7, 8, 9, 4]), "response": "24", "response_length": 2,
        "reward": 1.0, "rollout_log_probs": torch.tensor([-0.5, -0.25]), "status": "truncated", "metadata": {"a": [1, "x"]},
    }  # fmt: skip
    torch.save({"rollout_id": 5, "samples": [sample, {**sample, "tokens": [1, 2, 3]}]}, folder / "1.pt")
    (events,) = (folder / "trl-1.16.0/runs").glob("*/events*")
    (wandb,) = (folder / "wandb-0.31.0").rglob("run-*.wandb")
    return {
        "events": events, "wandb": wandb, "completions": folder / "trl-1.16.0/completions/completions_00001.parquet",
        "record": next(groups.glob("*.parquet")), "trackio": folder / "trackio-0.43.0/tiny-project.db",
        "mlflow": folder / "mlflow-3.17.2/mlflow.db", "dump": folder / "1.pt",
        "json lines": folder / "verl-0.9.1/metrics.jsonl",
    }  # fmt: skip


def outcome(name: str, source: Path, number: int, seed: int) -> tuple[str, str]:
    """Returns the outcome of a case, and what to look at if it is a fault."""

    def hangs(*_: Any) -> None:
        raise TimeoutError

    draw = random.Random(f"{seed} {number}")
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory() as work:
            return FORMATS[name](source, Path(work), draw), ""
    except TimeoutError:
        return "hang", traceback.format_exc()
    except Different as error:
        return "difference", str(error)
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)


def _work(numbers: range, seed: int, files: dict[str, Path], pipe: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    names = list(FORMATS)
    for number in numbers:
        name = names[number % len(names)]
        pipe.send((number, name))
        pipe.send(outcome(name, files[name], number, seed))
    pipe.send(None)


def cases(numbers: range, seed: int) -> list[tuple[int, str, str, str]]:
    """Returns number, format, outcome and text of each case. A child process reads, and another one follows if it dies."""
    found: list[tuple[int, str, str, str]] = []
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        files = sources(Path(folder))
        while numbers:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(numbers, seed, files, theirs), daemon=True)
            process.start()
            theirs.close()
            begun: tuple[int, str] | None = None
            try:
                while (begun := ours.recv()) is not None:
                    if not ours.poll(2 * SECONDS):
                        raise EOFError
                    found.append((*begun, *ours.recv()))
                    if len(found) % 1000 == 0:
                        print(len(found), dict(Counter(case[2] for case in found)), file=sys.stderr, flush=True)
                numbers = range(0)
            except EOFError:
                assert begun is not None
                process.join(1)
                kind = "hang" if process.is_alive() else "died"
                found.append((*begun, kind, f"exit code {process.exitcode}"))
                numbers = range(begun[0] + numbers.step, numbers.stop, numbers.step)
            process.kill()
            process.join()
    return found


def table(counts: dict[str, dict[str, int]]) -> str:
    """Returns the counts as a table in Markdown."""
    names = (*EXPECTED, *FAULTS)
    lines = [f"| format | cases | {' | '.join(names)} |", f"|---|{'---:|' * (len(names) + 1)}"]
    rows = {**counts, "all": dict(sum(map(Counter, counts.values()), Counter[str]()))}
    for name, row in rows.items():
        cells = [sum(row.values()), *(row.get(kind, 0) for kind in names)]
        lines.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the cases, prints each fault, and writes the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = cases(range(options.first, options.first + options.cases), options.seed)
    counts = {name: dict(Counter(case[2] for case in found if case[1] == name)) for name in FORMATS}
    for number, name, kind, text in found:
        if kind in FAULTS:
            print(f"{number} {name} {kind}: {text}")
    print(table(counts))
    if options.out:
        others = [name for name in ("pyarrow", "sqlite3", "torch", "tensorboard", "wandb") if _is_installed(name)]
        about = {"cases": len(found), "seed": options.seed, "compared_with": others, "counts": counts}
        options.out.write_text(json.dumps(about, indent=1) + "\n")
    return int(any(kind in FAULTS for _, _, kind, _ in found))


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


if __name__ == "__main__":
    sys.exit(main())
