"""Trackers' own files read back with the trackers' own readers: {metric: {step: value}}."""

import json
import struct
import time
from collections import defaultdict

BLOCK, HEADER = 32768, 7


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {name: {event.step: event.value for event in read.Scalars(name)} for name in read.Tags()["scalars"]}


def wandb(folder):
    """wandb reads its offline files in Go. The records are its own Protobuf messages, in LevelDB's log format."""
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found = defaultdict(dict)
    for record in _whole_wandb_file(file):
        if record.WhichOneof("record_type") != "history":
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = row.get("train/global_step", row["_step"])
        for name, value in row.items():
            found[name][step] = value
    return dict(found)


def _whole_wandb_file(file):
    """`wandb.finish` returns before its other process has written everything; the last records hold the exit code."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(300):
        records = [Record.FromString(data) for data in _leveldb(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end after 30 s.")


def _leveldb(data):
    """Records of a log: blocks of 32 KiB with fragments, each behind a checksum, its length and its kind."""
    assert data[:4] == b":W&B"
    at, whole = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too short for a header
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last fragment
            yield whole
            whole = b""


def trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("trustrl")
    found = defaultdict(dict)
    for row in SQLiteStorage.get_logs("trustrl", name):
        for metric, value in row.items():
            found[metric][row.get("train/global_step", row["step"])] = value
    return dict(found)


def mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("trustrl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return {
        name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


READERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow}
