"""Small files whose contents are huge, or without an end: one function for each, which writes the run or record to read."""

import io
import json
import sqlite3
import struct
import zipfile
import zlib

from support.run_folders import run_folder, write_records

MEGA = 1_000_000
STATE = {"log_history": [{"step": step, "reward": 0.5, "loss": 0.1} for step in range(1, 5)], "max_steps": 4}


def _trl(folder):
    (folder / "completions").mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    return folder / "completions/completions_00001.parquet"


def repeated_rows(folder):
    """A Parquet file of 8 million equal rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 500_000
    table = pa.table(
        {
            "step": pa.array([1] * rows, pa.int64()), "prompt": ["p"] * rows, "completion": ["c" * 20] * rows,
            "reward_a": [0.5] * rows, "advantage": [0.1] * rows,
        }
    )  # fmt: skip
    with pq.ParquetWriter(_trl(folder), table.schema, compression="zstd") as writer:
        for _ in range(16):
            writer.write_table(table)


def repeated_text(folder):
    """A Parquet file of 20,000 rows with one text of a megabyte."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * MEGA]))
    table = pa.table({"prompt": ["p"] * 20_000, "completion": text})
    pq.write_table(table, _trl(folder), compression="zstd", dictionary_pagesize_limit=10 * MEGA, store_schema=False)


def repeated_messages(folder):
    """The same inside a list of messages, as TRL stores a conversation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * MEGA]))
    messages = pa.ListArray.from_arrays(list(range(20_001)), pa.StructArray.from_arrays([text], ["content"]))
    table = pa.table({"prompt": ["p"] * 20_000, "completion": messages})
    pq.write_table(table, _trl(folder), compression="zstd", dictionary_pagesize_limit=10 * MEGA, store_schema=False)


def wide_parquet(folder):
    """A Parquet file of 20,000 columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {f"c{index}": [0.5] for index in range(20_000)}
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"], **columns}), _trl(folder))


def record_rows(folder):
    """A record, with checksums, of 8 million equal tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from support.run_folders import sealed

    write_records(folder, {"sequence": [1] * 1000})
    file = folder / "step-00000000.rank-0000.parquet"
    table = pq.ParquetFile(file).read()
    table = pa.concat_tables([table] * 65).slice(0, 65_000)
    with pq.ParquetWriter(file, table.schema, compression="zstd") as writer:
        for _ in range(120):
            writer.write_table(table)
    sealed(file)


def _pt(folder, dump):
    import torch

    (folder / "rollout_data").mkdir(parents=True)
    torch.save(dump, folder / "rollout_data/1.pt")
    return folder / "rollout_data/1.pt"


def _sample(**more):
    return {"prompt": "p", "response": "r", "response_length": 2, "tokens": [1, 2], "reward": 1.0, **more}


def expanded_tensor(folder):
    """A tensor of 300 million values that are one value."""
    import torch

    tokens = torch.zeros(1, dtype=torch.int64).expand(300 * MEGA)
    _pt(folder, {"rollout_id": 1, "samples": [_sample(tokens=tokens, response_length=300 * MEGA)]})


def shared_tensor(folder):
    """A thousand tensors that share a million values."""
    import torch

    tokens = torch.zeros(MEGA, dtype=torch.int64)
    _pt(
        folder,
        {"rollout_id": 1, "samples": [_sample(tokens=tokens[start:], response_length=9) for start in range(1000)]},
    )


def nested_lists(folder):
    """A prompt of lists inside lists, each ten times: a billion values once it is written out."""
    prompt = "x"
    for _ in range(9):
        prompt = [prompt] * 10
    _pt(folder, {"rollout_id": 1, "samples": [_sample(prompt=prompt)]})


def deflated_tensor(folder):
    """A tensor of 2 GB of zeros, compressed."""
    file = _pt(folder, {"rollout_id": 1, "samples": [_sample()]})
    content = zipfile.ZipFile(io.BytesIO(file.read_bytes()))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for entry in content.infolist():
            archive.writestr(entry.filename, content.read(entry))
        with archive.open("1/data/0", "w", force_zip64=True) as opened:
            for _ in range(200):
                opened.write(bytes(10 * MEGA))


def reserved_bytes(folder):
    """A pickle that asks for 8 GB, which torch grants: `bytearray` is one of its safe functions."""
    file = _pt(folder, {"rollout_id": 1, "samples": [_sample()]})
    content = zipfile.ZipFile(io.BytesIO(file.read_bytes()))
    with zipfile.ZipFile(file, "w") as archive:
        for entry in content.infolist():
            data = content.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", 8_000 * MEGA) + b"\x85R."
            archive.writestr(entry.filename, data)


def many_objects(folder):
    """150 MB of empty JSON objects."""
    folder.mkdir(parents=True)
    with (folder / "trainer_state.json").open("w") as file:
        file.write('{"log_history":[{"step":1,"reward":0.5}],"global_step":1,"x":[')
        for _ in range(50):
            file.write("{}," * MEGA)
        file.write("{}]}")


def deep_json(folder):
    """50 million JSON arrays inside each other."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"log_history":' + "[" * 50 * MEGA)


def blank_lines(folder):
    """A log of metrics of 300 million empty lines."""
    run_folder(folder)
    with (folder / "metrics.jsonl").open("wb") as file:
        for _ in range(300):
            file.write(b"\n" * MEGA)


def damaged_lines(folder):
    """A log of verl with 30 million lines that are not JSON."""
    folder.mkdir(parents=True)
    with (folder / "verl.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "data": {"actor/pg_loss": 0.5}}\n')
        for _ in range(30):
            file.write(b"x\n" * MEGA)


def endless_view(folder):
    """An MLflow database whose metrics are a view that counts without an end."""
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute("create table runs(run_uuid text, name text, status text, lifecycle_stage text)")
        database.execute("insert into runs values('u', 'n', 'FINISHED', 'active')")
        database.execute("create table params(key text, value text, run_uuid text)")
        database.execute(
            "create view metrics as with recursive r(i) as (select 1 union all select i + 1 from r) "
            "select 'k' as key, 1.0 as value, i as step, 0 as is_nan, 'u' as run_uuid, i as timestamp from r"
        )
    database.close()


def generated_column(folder):
    """A Trackio database whose metrics are computed: 800 MB in each row."""
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "proj.db") as database:
        database.execute("create table configs(run_name text, config text)")
        database.execute(
            "create table metrics(id integer primary key, run_name text, step integer, "
            "metrics text generated always as (hex(zeroblob(400000000))) virtual)"
        )
        database.executemany("insert into metrics(run_name, step) values('r', ?)", [(0,), (1,)])
    database.close()


def looped_table(folder):
    """An MLflow database whose inner page of metrics names one leaf hundreds of times, on several levels."""
    folder.mkdir(parents=True)
    file = folder / "mlflow.db"
    with sqlite3.connect(file) as database:
        database.execute("pragma page_size = 4096")
        database.execute("create table runs(run_uuid text, name text, status text, lifecycle_stage text)")
        database.execute("insert into runs values('u', 'n', 'FINISHED', 'active')")
        database.execute("create table params(key text, value text, run_uuid text)")
        database.execute(
            "create table metrics(key text, value float, timestamp integer, run_uuid text, step integer, is_nan integer)"
        )
        rows = (("k" * 20, 1.0, step, "u", step, 0) for step in range(60_000))
        database.executemany("insert into metrics values(?, ?, ?, ?, ?, ?)", rows)
        (root,) = database.execute("select rootpage from sqlite_master where name = 'metrics'").fetchone()
    database.close()
    data = bytearray(file.read_bytes())

    def children(page):
        start = (page - 1) * 4096
        assert data[start] == 5  # an inner page of a table
        cells = struct.unpack_from(f">{struct.unpack_from('>H', data, start + 3)[0]}H", data, start + 12)
        return [start + 8, *(start + cell for cell in cells)]

    inner = [struct.unpack_from(">I", data, place)[0] for place in children(root)]
    inner = [page for page in inner if data[(page - 1) * 4096] == 5]
    for page in (root, *inner[:1]):
        for place in children(page):
            struct.pack_into(">I", data, place, inner[0] if page == root else children(inner[0]) and inner[-1])
    file.write_bytes(data)


def _event_file(folder, records):
    from trustrl.runs.readers.tensorboard import crc32c, masked

    folder.mkdir(parents=True)
    with (folder / "events.out.tfevents.1.host").open("wb") as file:
        for record in records:
            header = struct.pack("<Q", len(record))
            crc = masked(crc32c(record)) if len(record) < 100_000 else 0
            file.write(header + struct.pack("<I", masked(crc32c(header))) + record + struct.pack("<I", crc))


def _field(number, data):
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def huge_tensor(folder):
    """Event files with tensors of 60 MB, and one whose record claims an exabyte."""
    tensor = _field(8, b"\x08\x01" + _field(4, bytes(60 * MEGA)))
    event = b"\x10\x01" + _field(5, _field(1, _field(1, b"loss") + tensor))
    scalar = b"\x10\x01" + _field(5, _field(1, _field(1, b"loss") + b"\x15" + struct.pack("<f", 0.5)))
    claims = b"\x10\x01\x2a" + _varint(2**60)
    _event_file(folder, [scalar, event, event, event, claims])


def many_tags(folder):
    """An event file with a new metric in each value."""
    values = [
        b"".join(_field(1, _field(1, b"%d" % (1000 * r + i)) + b"\x15" + bytes(4)) for i in range(1000))
        for r in range(100)
    ]
    _event_file(folder, [b"\x10\x01" + _field(5, value) for value in values])


def leveldb_log(records):
    """Returns the content of a W&B log: records in blocks of 32 KiB, with their checksums."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        start = 0
        while start == 0 or start < len(record):
            left = 32_768 - len(out) % 32_768
            if left < 8:
                out += bytes(left)
                continue
            piece = record[start : start + left - 7]
            is_last = start + len(piece) == len(record)
            kind = (1 if is_last else 2) if start == 0 else 4 if is_last else 3
            data = bytes([kind]) + piece
            out += struct.pack("<IH", zlib.crc32(data), len(piece)) + data
            start += len(piece)
            if is_last:
                break
    return bytes(out)


def _wandb(folder, records):
    (folder / "run-a").mkdir(parents=True)
    (folder / "run-a/run-a.wandb").write_bytes(leveldb_log(records))


def long_names(folder):
    """A W&B log with a name of a megabyte around 100,000 values."""
    value = json.dumps({str(index): 1 for index in range(100_000)}).encode()
    item = _field(1, b"k" * MEGA) + _field(16, value)
    _wandb(folder, [_field(2, _field(1, item))])


def huge_lengths(folder):
    """A W&B log whose records claim fields of an exabyte, and one record that never ends."""
    _wandb(folder, [b"\x12" + _varint(2**60), _field(2, b"\x0a" + _varint(2**40)), bytes(70 * MEGA)])


def giant_field(folder):
    """A CSV file with a field of 100 MB."""
    folder.mkdir(parents=True)
    with (folder / "a.csv").open("w") as file:
        file.write('step,reward\n1,0.5\n2,"')
        for _ in range(100):
            file.write("x" * MEGA)


def wide_csv(folder):
    """A CSV file with 20 million columns."""
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("step" + ",a" * 20 * MEGA + "\n1" + ",1" * 20 * MEGA + "\n")


def many_values(folder):
    """A CSV file of 60 MB with 30 million values."""
    folder.mkdir(parents=True)
    with (folder / "a.csv").open("w") as file:
        file.write("step," + ",".join(f"c{index}" for index in range(3_000)) + "\n")
        for step in range(10_000):
            file.write(f"{step}" + ",1" * 3_000 + "\n")


def wide_yaml(folder):
    """A hydra configuration of 4 MB of empty lists."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text("a: [" + "[]," * 1_300_000 + "]\n")


def wide_console(folder):
    """A console log of verl with a line of 5 million metrics."""
    folder.mkdir(parents=True)
    (folder / "c.log").write_text("verl\nstep:1 - " + " - ".join(f"m{index}:1.0" for index in range(5 * MEGA)) + "\n")


def literal(folder):
    """A console log with a printed configuration of 2 MB."""
    folder.mkdir(parents=True)
    (folder / "c.log").write_text("{'actor_rollout_ref': [" + "[]," * 650_000 + "]}}\nstep:1 - critic/score/mean:0.5\n")


def sparse_files(folder):
    """Files of 10 GB without content."""
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "run-x.wandb", "events.out.tfevents.1.v", "p.db", "a.csv", "c.log"):
        with (folder / name).open("wb") as file:
            file.truncate(10_000 * MEGA)


def junk_metrics(folder):
    """An MLflow folder with 20 million damaged lines."""
    for name in ("metrics", "params"):
        (folder / name).mkdir(parents=True)
    (folder / "meta.yaml").write_text("run_name: a\n")
    (folder / "metrics/loss").write_bytes(b"1 0.5 1\n" + b"x\n" * 20 * MEGA)


FILES = {
    "repeated rows (Parquet)": (repeated_rows, "its 8,000,000 rows may take"),
    "repeated text (Parquet)": (repeated_text, "its 20,000 rows may take"),
    "repeated text in messages (Parquet)": (repeated_messages, "its 20,000 rows may take"),
    "20,000 columns (Parquet)": (wide_parquet, ""),
    "repeated tokens (record)": (record_rows, "its 7,800,000 rows may take"),
    "expanded tensor (.pt)": (expanded_tensor, "300,000,000 values is stored in 8 bytes"),
    "shared tensor (.pt)": (shared_tensor, "its values may take"),
    "nested lists (.pt)": (nested_lists, "its values may take"),
    "deflated tensor (.pt)": (deflated_tensor, "an entry is compressed"),
    "reserved bytes (.pt)": (reserved_bytes, "asks for memory of any size"),
    "many objects (JSON)": (many_objects, "its values may take"),
    "deep arrays (JSON)": (deep_json, "its values may take|nested more than"),
    "blank lines (JSON Lines)": (blank_lines, "line 1, must be JSON"),
    "damaged lines (JSON Lines)": (damaged_lines, "1,000 lines are damaged; the rest is left out"),
    "endless view (SQLite)": (endless_view, "metrics must be a table, got a view"),
    "generated column (SQLite)": (generated_column, "metrics.metrics must be stored"),
    "looped pages (SQLite)": (looped_table, "mlflow.db: "),
    "huge tensors (TensorBoard)": (huge_tensor, "is damaged"),
    "many tags (TensorBoard)": (many_tags, ""),
    "long names (W&B)": (long_names, "a name has more than 1,000 characters"),
    "huge lengths (W&B)": (huge_lengths, "a record is larger than 16,000,000 bytes"),
    "giant field (CSV)": (giant_field, "larger than|field"),
    "20 million columns (CSV)": (wide_csv, "larger than 8,000,000 bytes"),
    "30 million values (CSV)": (many_values, "may take"),
    "1,300,000 lists (YAML)": (wide_yaml, "Larger than 1,000,000 bytes"),
    "long line (console log)": (wide_console, "larger than 8,000,000 bytes"),
    "long literal (console log)": (literal, "the printed configuration could not be parsed"),
    "10 GB of nothing": (sparse_files, "Larger than"),
    "damaged lines (MLflow)": (junk_metrics, "1,000 lines are damaged; the rest is left out"),
}  # fmt: skip
"""Function that writes a run, and words of the sentence about it. Runs without such words are read."""
