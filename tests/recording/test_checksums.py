"""Checksums of part files and of the JSON files next to them: a changed bit is refused, or changes nothing."""

import io
import json
import os
import struct
import warnings

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from support import recording_batches as batches
from support.run_folders import sealed, write_groups, write_records
from trustrl.cli import main
from trustrl.errors import RecordError, TrustRLWarning
from trustrl.recording import (
    NonFinite,
    Recorder,
    Recording,
    checksums,
    read,
    read_run,
    read_sequences,
    read_texts,
    stream,
)
from trustrl.recording.checksums import MARK, checked_file
from trustrl.recording.record_files import parts_in, read_table
from trustrl.recording.storage import place
from trustrl.regions.presets import preset
from trustrl.runs.readers.record_tables import completions

PART = "step-00000000.rank-0000.parquet"


@pytest.fixture
def folder(tmp_path):
    region = preset("dppo-binary-tv")
    recorder = Recorder(Recording(folder=tmp_path / "records", sample=1.0), region, rank=0)
    recorder.add_sequences(batches.sequence_rows(range(8)), step=0)
    batches.give(recorder, batches.batch(region=region), step=0)
    return tmp_path / "records"


def values(folder):
    return read(folder).table.to_pydict()


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(folder):
    file = folder / PART
    data, whole = file.read_bytes(), repr(values(folder))
    refused = 0
    for at in range(0, len(data), 11):
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            assert repr(_read_quietly(folder)) == whole, at
        except RecordError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 0.9 * len(range(0, len(data), 11))


def _read_quietly(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)  # the bit was in the mark of the checksums
        return values(folder)


@pytest.mark.parametrize("table", ["", "sequences", "texts"])
def test_the_error_names_the_bytes(table, folder):
    file = folder / table / PART
    data = file.read_bytes()
    file.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    with pytest.raises(RecordError, match=r"checksum of bytes [\d,]+ to [\d,]+ is wrong"):
        {"": read, "sequences": read_sequences, "texts": read_texts}[table](folder)
    if not table:
        with pytest.raises(RecordError, match="is wrong; the file is damaged"):
            list(stream(file))


def test_pages_have_checksums_of_their_own_and_other_readers_see_the_same_table(folder):
    file = folder / PART
    assert pq.read_table(file, page_checksum_verification=True).to_pydict() == values(folder)
    data = file.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    assert data[: len(data) - 8 - length].endswith(MARK)
    column = pq.read_metadata(file).row_group(0).column(9)
    broken = bytearray(data)
    broken[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(io.BytesIO(bytes(broken)), page_checksum_verification=True)


def test_a_file_without_checksums_is_read_with_a_warning(folder):
    whole = values(folder)
    file = folder / PART
    pq.write_table(pq.read_table(file), file)
    assert not checked_file(io.BytesIO(file.read_bytes()))[2]
    with pytest.warns(TrustRLWarning, match="have no checksums"):
        assert values(folder) == whole


def test_run_json_and_trigger_files_have_checksums(tmp_path):
    region = preset("dppo-binary-tv")
    recorder = Recorder(Recording(folder=tmp_path, sample=1.0, ring_steps=1, triggers=(NonFinite(),)), region, rank=0)
    batches.give(recorder, batches.batch(region=region, at={(0, 0): float("nan")}), step=0)
    (trigger,) = tmp_path.glob("dump-*/trigger.rank-0000.json")
    assert json.loads(trigger.read_text())["checksum"].startswith("crc32:")
    file = tmp_path / "run.json"
    text = file.read_text()
    file.write_text(text.replace('"region_role": null', '"region_role": "observed"'))
    with pytest.raises(RecordError, match="its checksum is wrong"):
        read_run(tmp_path)
    file.write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != "checksum"}))
    assert read_run(tmp_path)["region_role"] is None


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"entropy": [None, 1.0, 1.0]}, "have entropy in all rows or in none, got row 1"),
        ({"position": [0, 1, -1]}, "have position ≥ 0, got row 2"),
        ({"step": [0, 0, 5]}, r"have the step of its name \(0\) in the column step, got row 2"),
        ({"sequence": [1, -4]}, "have sequence ≥ 0, got row 1"),
    ],
)
def test_values_that_break_the_specification_are_refused_with_their_row(columns, says, tmp_path):
    write_records(tmp_path, columns)
    for reading in (read, lambda path: list(stream(path / PART))):
        with pytest.raises(RecordError, match=says):
            reading(tmp_path)


def test_a_null_in_a_column_without_nulls_is_refused(tmp_path):
    import pyarrow as pa

    write_records(tmp_path, {"policy_logp": [-1.0, -2.0]})
    table = pq.read_table(tmp_path / PART)
    at = table.column_names.index("policy_logp")
    field = table.schema.field(at).with_nullable(True)
    pq.write_table(table.set_column(at, field, pa.array([-1.0, None], field.type)), tmp_path / PART)
    sealed(tmp_path / PART)
    for reading in (read, lambda path: list(stream(path / PART))):
        with pytest.raises(RecordError, match="have policy_logp in every row, got row 1"):
            reading(tmp_path)


@pytest.mark.parametrize("name", ["../../secret.parquet", "/etc/passwd", "x", "step-1.rank-0.parquet"])
def test_a_sequence_cannot_name_a_file_outside_of_texts(name, tmp_path):
    import pyarrow as pa

    folder = write_groups(tmp_path / "records", {"p": (0.0, 1.0)})
    file = folder / "sequences" / PART
    table = pq.read_table(file)
    at = table.column_names.index("text")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array([name] * len(table))), file)
    sealed(file)
    with pytest.raises(RecordError, match="must name files in texts/"):
        list(completions(str(folder)))


def test_links_out_of_the_folder_and_other_names_are_refused(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere.parquet"
    (folder / PART).rename(elsewhere)
    (folder / PART).symlink_to(elsewhere)
    with pytest.raises(RecordError, match="got a link to"):
        read(folder)
    (folder / PART).unlink()
    elsewhere.rename(folder / "step-00000000.rank-0000 (copy).parquet")
    with pytest.raises(RecordError, match="must be named step-XXXXXXXX"):
        parts_in(place(folder))
    shared = tmp_path / "shared"
    (folder / "sequences").rename(shared)
    (folder / "sequences").symlink_to(shared)
    with pytest.raises(RecordError, match="got a link to"):
        read_sequences(folder)


def test_a_link_inside_the_folder_and_a_folder_behind_a_link_are_read(folder, tmp_path):
    whole = values(folder)
    (folder / PART).rename(folder / "kept")
    (folder / PART).symlink_to("kept")
    (tmp_path / "latest").symlink_to(folder)
    assert values(tmp_path / "latest") == whole


def test_what_is_not_a_regular_file_is_refused_at_once(folder):
    (folder / PART).unlink()
    os.mkfifo(folder / PART)
    with pytest.raises(RecordError, match=PART):
        read(folder)
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with pytest.raises(RecordError, match="Not a regular file"):
        read_run(folder)


def test_a_link_to_itself_is_refused(folder, capsys):
    (folder / PART).unlink()
    (folder / PART).symlink_to(PART)
    for verb in ("audit", "calibrate", "bound"):
        assert main([verb, str(folder)]) == 1
        assert PART in capsys.readouterr().err
    assert main(["report", str(folder / PART)]) == 2


def test_the_pages_of_a_file_are_walked_once_and_again_after_a_change(tmp_path, monkeypatch):
    write_groups(tmp_path, {"1+1=": [1.0, 0.0]})
    (file,) = tmp_path.glob("*.parquet")
    walked, check = [], checksums.check_record
    monkeypatch.setattr(checksums, "_CHECKED", set())
    monkeypatch.setattr(checksums, "check_record", lambda *about: walked.append(1) or check(*about))
    for _ in range(3):
        read_table(file)
    assert len(walked) == 1
    os.utime(file, ns=(0, 0))
    read_table(file)
    monkeypatch.setenv("TRUSTRL_READ_LIMITS", "2")
    read_table(file)
    assert len(walked) == 3
