"""Records in the bucket of an S3 server on this machine: written by a loop, audited on a cluster that loses a node."""

import importlib.util
import json
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
if "TRUSTRL_MOTO" not in os.environ and importlib.util.find_spec("moto") is None:
    pytest.skip("needs moto, an S3 server, here or in the folder TRUSTRL_MOTO", allow_module_level=True)

from support import recorded, recording_batches as batches
from support.s3_server import s3_server
from support.slow_counts import counted_slowly
from trustrl.cli import main
from trustrl.errors import RecordError
from trustrl.recording import Recorder, Recording, read, read_run, read_sequences, read_texts
from trustrl.recording.record_files import part_files
from trustrl.regions.presets import preset
from trustrl.tools.audit import TokenCounts, arm, count_records
from trustrl.tools.audit.region_replay import COLUMNS

ARMS = [arm(name, preset(name)) for name in ("ppo", "gspo", "dppo-topk-tv")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as made:
        yield made


def test_a_bucket_holds_what_a_folder_holds(server, tmp_path, capsys):
    address = server.bucket("same")
    for folder in (address, tmp_path):
        made = Recorder(Recording(folder=folder, sample=1.0, ring_steps=2), batches.REGION, rank=0)
        for step in (0, 1):
            made.add_sequences(batches.sequence_rows(range(8)), step=step)
            bad = {(0, 0): float("-inf")} if step else {}
            batches.give(made, batches.batch(seed=step, at=bad), step=step)
        made.flush()
    assert read(address).table.equals(read(tmp_path).table)
    assert read_sequences(address).equals(read_sequences(tmp_path))
    assert read_texts(address).equals(read_texts(tmp_path))
    assert read_run(address)["region"] == read_run(tmp_path)["region"]
    dump = address.replace("records?", "records/dump-00000001?")
    assert read(dump).table.equals(read(tmp_path / "dump-00000001").table)
    printed = []
    for folder in (address.replace("/records?", "?"), tmp_path):  # the run, and the records themselves
        assert main(["audit", str(folder), "--regions", "ppo", "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert main(["records", "check", address]) == 0
    assert "testing" not in capsys.readouterr().err  # the key
    made = Recorder(Recording(folder=address, sample=1.0), batches.REGION, rank=0)
    made.add_sequences(batches.sequence_rows(), step=1)  # a resumed run records step 1 again
    made.flush()
    assert set(read(address)["step"].tolist()) == {0}
    with pytest.raises(RecordError, match="No records found"):
        read(dump)


def test_a_cluster_that_loses_a_node_counts_what_one_process_counts(server, tmp_path, monkeypatch):
    pytest.importorskip("ray.data")
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]))
    import ray
    from ray.cluster_utils import Cluster

    address, marks = server.bucket("cluster"), tmp_path / "marks"
    marks.mkdir()
    recorded.record(address, seeds=range(12))
    local = recorded.record(tmp_path / "records", seeds=range(12))
    files = part_files(address)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    lost = []

    def take_a_node_away():
        """Removes the first of the other nodes that has begun to count, before it is done."""
        while not lost:
            for node in others:
                begun, done = (list(marks.glob(f"{node.node_id}.*.{end}")) for end in ("begun", "done"))
                if len(begun) > len(done) and not lost:
                    lost.append(node.node_id)
                    cluster.remove_node(node, allow_graceful=False)
            time.sleep(0.02)

    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        cluster.wait_for_nodes()
        threading.Thread(target=take_a_node_away, daemon=True).start()
        of = partial(counted_slowly, arms=ARMS, folder=str(marks), seconds=3.0)
        found = count_records(files, of, kind=TokenCounts, columns=COLUMNS, workers=3, where="ray")
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    finally:
        ray.shutdown()
        cluster.shutdown()
    ends = [tuple(path.name.split(".")[::2]) for path in Path(marks).iterdir()]
    assert len(alive) == 2
    assert lost[0] not in alive
    # It was counting when it went, another node counted that again, and every node took part.
    assert ends.count((lost[0], "begun")) > ends.count((lost[0], "done"))
    assert len({node for node, _ in ends}) == 3
    assert sum(end == "done" for _, end in ends) >= len(files)
    assert found == count_records(
        part_files(local), partial(TokenCounts.of, arms=ARMS), kind=TokenCounts, columns=COLUMNS
    )
