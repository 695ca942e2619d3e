"""Seeded damage to one file of an input: bits, cuts, hostile values, and entries that are not regular files."""

import json
import os
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

HOSTILE = (
    "\x1b[31mred\x1b[0m", "\u202ereversed\u202c", "\x00\x07\x08", "\x9b2J", "a\nerror: forged", "\u2028\u2066x",
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "../../etc/passwd", "x" * 100_000, "",
    "a" + "\u0301" * 50, "'\"`$(id)", "\ud800", "%s%n{0}", "nan",
)  # fmt: skip
"""Strings that try to be something else."""

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 2**31, 2**63, 2**64, 10**19, 10**30, -(10**400), 1e308, -1e308, 5e-324, float("nan"),
    float("inf"), float("-inf"), [], {}, [[]], {"": {}}, [None] * 3, *HOSTILE,
)  # fmt: skip

DEEP = {
    "json": (b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"[" * 400 + b"]" * 400),
    "toml": (b"a = " + b"[" * 5_000, b"a" + b".a" * 5_000 + b" = 1\n", b"a = " + b"[" * 200 + b"]" * 200 + b"\n"),
    "yaml": (b"a: " + b"[" * 3_000, b"".join(b" " * n + b"a:\n" for n in range(400)), b""),
}
LAUGHS = b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
)
"""YAML whose aliases stand for 9 to the power of 12 values."""


class Damage(NamedTuple):
    """Damage that was done."""

    what: str
    is_flip: bool
    """True if bits of the file changed, and nothing else: a file with checksums must notice it."""


def damaged(file: Path, form: str, draw: random.Random, outside: Path) -> Damage:
    """Damages a file.

    Args:
        file: The file.
        form: Its format.
        draw: Source of random numbers.
        outside: Another file, out of the input's folder.
    """
    kinds = [*GENERAL, *GENERAL[:4], *OF_FORMAT.get(form, ())]
    if form == "parquet":
        kinds += [_flip] * 12
    how = draw.choice(kinds)
    return how(file, draw, outside) or Damage(how.__name__.strip("_"), how in FLIPS)


def _data(file: Path) -> bytearray:
    return bytearray(file.read_bytes())


def _flip(file: Path, draw: random.Random, _: Path) -> None:
    data = _data(file)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, draw: random.Random, _: Path) -> None:
    data = _data(file)
    file.write_bytes(data[: draw.randrange(len(data) or 1)])


def _zeros(file: Path, draw: random.Random, _: Path) -> None:
    data = _data(file)
    at, num = draw.randrange(len(data) or 1), draw.choice((1, 16, 512, 4096))
    data[at : at + num] = bytes(len(data[at : at + num]))
    file.write_bytes(data)


def _noise(file: Path, draw: random.Random, _: Path) -> None:
    data = _data(file)
    at, num = draw.randrange(len(data) or 1), draw.choice((1, 16, 256))
    data[at : at + num] = draw.randbytes(draw.choice((num, num, 0, 2 * num)))
    file.write_bytes(data)


def _append(file: Path, draw: random.Random, _: Path) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.choice((1, 8, 1000))))


def _garbage(file: Path, draw: random.Random, _: Path) -> None:
    file.write_bytes(draw.choice((b"", b"\0", b"PAR1", b"{}", b"[]", b"null", draw.randbytes(5000), b"\xff\xfe" * 50)))


def _fifo(file: Path, *_: Any) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path, *_: Any) -> None:
    file.unlink()
    file.mkdir()


def _link_out(file: Path, draw: random.Random, outside: Path) -> None:
    file.unlink()
    file.symlink_to(draw.choice((str(outside), "/dev/zero", "/dev/stdin", file.name, "nowhere")))


def _huge(file: Path, *_: Any) -> None:
    with file.open("ab") as opened:
        opened.truncate(2**40)


def _swapped(file: Path, draw: random.Random, _: Path) -> Damage | None:
    others = sorted(one for one in file.parent.rglob("*") if one.is_file() and one != file)
    if not others:
        return Damage("nothing", is_flip=True)
    other = draw.choice(others)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return None


def _unreadable(file: Path, draw: random.Random, _: Path) -> None:
    file.rename(
        file.with_name(draw.choice(("step-x.parquet", f"{file.stem} (copy){file.suffix}", "\x1b[31m\n\u202e.jsonl")))
    )


def _mutated(value: Any, draw: random.Random, level: int = 0) -> Any:
    """Replaces, adds or removes one entry somewhere in a JSON value."""
    if isinstance(value, dict) and value and (level == 0 or draw.random() < 0.7):
        key = draw.choice(list(value))
        how = draw.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return {**value, draw.choice(HOSTILE): draw.choice(VALUES)}
        return {**value, key: _mutated(value[key], draw, level + 1)}
    if isinstance(value, list) and value and (level == 0 or draw.random() < 0.7):
        at = draw.randrange(len(value))
        return [*value[:at], _mutated(value[at], draw, level + 1), *value[at + 1 :]]
    return draw.choice(VALUES)


def _json_value(file: Path, draw: random.Random, _: Path) -> None:
    file.write_text(json.dumps(_mutated(json.loads(file.read_bytes()), draw)))


def _jsonl_value(file: Path, draw: random.Random, _: Path) -> None:
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    changed = json.dumps(_mutated(json.loads(lines[at]), draw))
    lines[at] = draw.choice(
        (changed, changed, lines[at] * 2, changed + "\x00", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900)
    )
    file.write_text("\n".join(lines) + draw.choice(("\n", "")))


def _deep(form: str) -> Any:
    def deep(file: Path, draw: random.Random, _: Path) -> None:
        text = draw.choice(DEEP[form])
        file.write_bytes(draw.choice((text, file.read_bytes() + b"\n" + text)))

    return deep


def _text_value(file: Path, draw: random.Random, _: Path) -> None:
    """Replaces a number, a word or a string by a hostile one."""
    text = file.read_text(errors="replace")
    found = list(re.finditer(r"-?\d[\d.e+-]*|\"[^\"\n]*\"|\b\w+\b", text))
    if found:
        one = draw.choice(found)
        value = draw.choice((*VALUES, 10**5000 if draw.random() < 0.2 else 7))
        shown = json.dumps(value) if isinstance(value, (str, list, dict)) or draw.random() < 0.3 else str(value)
        text = text[: one.start()] + shown + text[one.end() :]
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def _laughs(file: Path, *_: Any) -> None:
    file.write_bytes(LAUGHS)


def _parquet_value(file: Path, draw: random.Random, _: Path) -> None:
    """Writes the table again with hostile values or metadata, with or without checksums."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from support.run_folders import sealed

    with pq.ParquetFile(file) as opened:
        table, own = opened.read(), opened.metadata.metadata or {}
    for _ in range(draw.choice((1, 1, 3))):
        table = _changed_column(pa, table, draw)
    metadata = {**(table.schema.metadata or {}), **{k: v for k, v in own.items() if k.startswith(b"trustrl")}}
    if metadata and draw.random() < 0.4:
        key = draw.choice(list(metadata))
        bad = (
            b"",
            b"9" * 5000,
            b"\xff",
            b"[" * 5000,
            b'{"kind": "dppo", "x": 1}',
            b"-1",
            b"null",
            b'{"kind": []}',
            b'{"rows": 1e999}',
        )
        metadata[key] = draw.choice(bad)
    pq.write_table(table.replace_schema_metadata(metadata), file, write_page_checksum=True)
    if draw.random() < 0.7:
        sealed(file)


def _changed_column(pa: Any, table: Any, draw: random.Random) -> Any:
    at = draw.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    how = draw.random()
    if how < 0.1:
        return table.remove_column(at)
    if how < 0.2:
        return table.set_column(
            at, name, pa.array([draw.choice(HOSTILE).encode("utf-8", "replace").decode()] * len(table))
        )
    values = column.to_pylist()
    for _ in range(draw.choice((1, len(values)))):
        if values:
            values[draw.randrange(len(values))] = draw.choice((*VALUES, 7, -7, 0.5))
    try:
        return table.set_column(at, table.schema.field(at).with_nullable(True), pa.array(values, column.type))
    except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
        nulls = pa.array([None if draw.random() < 0.5 else one for one in column.to_pylist()], column.type)
        return table.set_column(at, table.schema.field(at).with_nullable(True), nulls)


def _sqlite_value(file: Path, draw: random.Random, _: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(file)
    tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
    name = draw.choice(tables)
    column = draw.choice([row[1] for row in connection.execute(f'pragma table_info("{name}")')])
    value = draw.choice((None, -1, 2**62, 1e308, float("inf"), b"\xff\xfe", "[" * 5000, *HOSTILE[:13]))
    try:
        connection.execute(f'update "{name}" set "{column}" = ?', (value,))
        connection.commit()
    except sqlite3.Error:
        connection.rollback()
    connection.close()


GENERAL = (_flip, _cut, _zeros, _noise, _append, _garbage, _fifo, _folder, _link_out, _huge, _swapped, _unreadable)
FLIPS = (_flip, _cut, _zeros, _noise, _append)
OF_FORMAT = {
    "json": (*[_json_value] * 8, *[_deep("json")] * 2, _text_value, _text_value),
    "jsonl": (*[_jsonl_value] * 8, _text_value, _text_value, _deep("json")),
    "toml": (*[_text_value] * 10, *[_deep("toml")] * 2),
    "yaml": (*[_text_value] * 6, _deep("yaml"), _laughs),
    "text": (*[_text_value] * 8,),
    "csv": (*[_text_value] * 8,),
    "parquet": (*[_parquet_value] * 10,),
    "sqlite": (*[_sqlite_value] * 8,),
}
