"""Records in stores: the same tables through every kind of address, and stores that fail."""

import os
import pickle
import warnings
from pathlib import Path
from uuid import uuid4

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")

import fsspec
import torch

from support import recording_batches as batches
from trustrl.errors import ConfigError, MissingPackageError, RecordError
from trustrl.recording import (
    QuantileAbove,
    Recorder,
    Recording,
    read,
    read_run,
    read_sequences,
    read_texts,
    storage,
    stream,
)  # fmt: skip
from trustrl.recording.record_files import part_files
from trustrl.recording.storage import Remote, address_of, place

FIRES = {"ring_steps": 2, "triggers": (QuantileAbove(of="log_ratio", level=0.0, at_most_every=2),)}


def recorder(folder, rank=0, **more):
    usual = {"sample": 1.0, "ring_steps": 0, "triggers": ()}
    return Recorder(Recording(folder=folder, **usual | more), batches.REGION, rank=rank)


def record(folder, steps=range(4), **more):
    made = recorder(folder, **more)
    for step in steps:
        made.add_sequences(batches.sequence_rows(range(8)), step=step)
        batches.give(made, batches.batch(seed=step), step=step)
    made.flush()
    return folder


@pytest.fixture(params=["path", "file", "local", "memory"])
def address(request, tmp_path):
    """An empty folder: on disk, by URL, on disk through fsspec, and in fsspec's memory."""
    made = {
        "path": f"{tmp_path}/a b/records", "file": (tmp_path / "a b" / "records").as_uri(),
        "local": f"local://{tmp_path}/records", "memory": f"memory://{uuid4().hex}/records",
    }  # fmt: skip
    return made[request.param]


def names(address):
    where = place(address)
    return sorted(one.name for one in storage.entries(where, "*"))


def test_every_address_holds_the_same_record(address, tmp_path):
    plain = record(tmp_path / "plain", **FIRES)
    record(address, **FIRES)
    assert read(address).table.equals(read(plain).table)
    assert read_sequences(address).equals(read_sequences(plain))
    assert read_texts(address).equals(read_texts(plain))
    assert read_run(address)["region"] == read_run(plain)["region"] is not None
    assert names(address) == sorted(os.listdir(plain))
    dump = place(address) / "dump-00000002"
    assert read(dump).table.equals(read(plain / "dump-00000002").table)
    assert names(dump) == sorted(os.listdir(plain / "dump-00000002"))
    files = part_files(address)
    assert sum(map(len, stream(files))) == len(read(plain).table)
    assert sum(map(len, stream(address_of(files[0])))) == len(read(plain / files[0].name).table)


def test_a_resumed_process_takes_back_its_files(address):
    record(address, **FIRES)
    record(address, rank=1, **FIRES)
    again = recorder(address, **FIRES)
    again.add_sequences(batches.sequence_rows(), step=2)
    again.flush()
    left = {0: {0, 1}, 1: {0, 1, 2, 3}}
    found = read(address)
    assert {rank: set(found["step"][found["rank"] == rank].tolist()) for rank in left} == left
    table = read_sequences(address)
    assert {*zip(table["rank"].to_pylist(), table["step"].to_pylist(), strict=True)} == {
        (rank, step) for rank, steps in left.items() for step in steps
    }
    dump = place(address) / "dump-00000002"
    assert {name.split(".")[1] for name in names(dump)} == {"rank-0001"}


def test_files_of_another_process_travel_as_addresses(address):
    record(address)
    for file in part_files(address):
        assert place(address_of(file)) == file
        assert torch.equal(read(pickle.loads(pickle.dumps(file)))["position"], read(file)["position"])


def test_where_there_is_nothing_says_so(address):
    with pytest.raises(RecordError, match="No records found"):
        read(address)
    assert len(read_sequences(address)) == 0
    assert read_run(address) is None


def test_a_file_of_another_table_is_refused(tmp_path):
    record(tmp_path)
    with pytest.raises(RecordError, match="must be a file of the tokens table, got one of the sequences table"):
        read(tmp_path / "sequences")


class Failing(fsspec.get_filesystem_class("memory")):
    """Memory that refuses to write, with an error that is not an OSError."""

    protocol = "failing"
    cachable = False

    def _open(self, path, mode="rb", **more):
        if mode == "wb":
            raise RuntimeError("token expired")
        return super()._open(path, mode, **more)


def test_a_store_that_fails_at_the_start_is_an_error():
    fsspec.register_implementation("failing", Failing, clobber=True)
    with pytest.raises(OSError, match="RuntimeError: token expired"):
        recorder(f"failing://{uuid4().hex}/records")


def test_a_file_that_cannot_be_completed_leaves_nothing_behind(monkeypatch):
    where = place(f"memory://{uuid4().hex}/x.json")
    monkeypatch.setattr(storage, "copyfileobj", lambda source, sink, _: sink.write(b"half") and 1 / 0)
    with pytest.raises(OSError, match="ZeroDivisionError"):
        storage.write_text(where, "whole")
    assert not storage.is_file(where)


def test_large_remote_files_continue_on_disk(monkeypatch):
    monkeypatch.setattr(storage, "IN_MEMORY", 100)
    address = record(f"memory://{uuid4().hex}/records")
    assert set(read(address)["step"].tolist()) == {0, 1, 2, 3}


def test_addresses_keep_their_settings_and_hide_their_keys():
    folder = place("s3://key:secret@bucket/run?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1")
    file = folder / "records" / "a.parquet"
    assert isinstance(file, Remote)
    assert address_of(file) == (
        "s3://key:secret@bucket/run/records/a.parquet?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    )
    assert (file.path, file.name, str(file)) == (
        "bucket/run/records/a.parquet", "a.parquet", "s3://bucket/run/records/a.parquet",
    )  # fmt: skip
    assert "secret" not in repr(file)
    assert str(place("abfs://container@account.dfs.core.windows.net/x")) == (
        "abfs://container@account.dfs.core.windows.net/x"
    )


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        ("nowhere://bucket/x", ConfigError, "a scheme that pyarrow or fsspec knows, got `nowhere://bucket`"),
        (Path("s3://bucket/x"), ConfigError, "two slashes after the scheme, got `s3:/bucket/x`. Pass it as a string"),
        ("adl://bucket/x", MissingPackageError, "`adl://bucket` needs a package that is not installed"),
    ],
)
def test_unknown_addresses_are_refused(address, error, says):
    with pytest.raises(error, match=says):
        place(address)
    with pytest.raises(error, match=says):
        recorder(address)


def test_two_processes_of_a_rank_do_not_mix_in_a_store():
    address = f"memory://{uuid4().hex}/records"
    earlier, later = recorder(address), recorder(address)
    stopped = None
    for step in range(8):
        for made, seed in ((earlier, 0), (later, 50)):
            b = batches.batch(seed=seed + step, first=1000 * seed + 10 * step)
            made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=step)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            earlier.end_step(step, None)
        later.end_step(step, None)
        for made in (earlier, later):
            if made._writer._asked is not None:
                made._writer._asked.exception()  # the store has answered
        if any("took over rank 0" in str(one.message) for one in said):
            stopped = step
    assert stopped == 1  # at step 0 it asked
    assert read(address)["sequence"].min() >= 50_000
    assert {*read(address)["step"].tolist()} == set(range(8))
