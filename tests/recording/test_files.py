"""Part files: what goes in comes out, whole or not at all, and nobody else's is taken for one."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import trustrl
from support import recording_batches as batches
from support.run_folders import sealed
from trustrl.errors import MissingPackageError, RecordError
from trustrl.recording import (
    COLUMNS,
    VERSION,
    QuantileAbove,
    Recorder,
    Recording,
    read,
    record_writer,
    sequence_ids,
    stream,
)  # fmt: skip
from trustrl.recording.schema import REGION_KEY, STEP_KEY, VERSION_KEY, bytes_per_token
from trustrl.recording.token_rows import Rows

ROOT = Path(__file__).parents[2]


def recorder(folder, region=batches.REGION, rank=0, **more):
    usual = {"sample": 1.0, "ring_steps": 0, "triggers": ()}
    return Recorder(Recording(folder=folder, **usual | more), region, rank=rank)


@pytest.fixture(params=["sampled token", "both anchors and a top-K", "no entropy"])
def case(request):
    if request.param == "both anchors and a top-K":
        region = trustrl.preset("dppo-topk-tv")
        return region, batches.batch(region=region, k=20, proximal=True)
    return batches.REGION, batches.batch(entropy=None if request.param == "no entropy" else True)


def test_a_file_holds_what_the_loss_decided_bit_for_bit(case, tmp_path):
    region, b = case
    batches.give(recorder(tmp_path, region, rank=2, topk=True), b, step=12, update=3)
    found = read(tmp_path / "step-00000012.rank-0002.parquet")
    on = b.rollout.in_loss
    row, position = on.nonzero(as_tuple=True)
    interval = b.out.decision.divergence
    expected = {
        "step": torch.full_like(row, 12), "update": torch.full_like(row, 3), "rank": torch.full_like(row, 2),
        "sequence": b.sequences[row], "position": position, "token_id": b.rollout.token_ids[on],
        "advantage": b.rollout.advantage[row], "behavior_logp": b.rollout.behavior_logp[on],
        "policy_logp": b.policy.logp.detach()[on], "weight": b.out.decision.weight[on], "kept": b.out.decision.keep[on],
        "divergence_lower": interval.lower[on], "divergence_upper": interval.upper[on],
        "sampler_version": b.rollout.version[on], "turn": b.rollout.turn[on],
    }  # fmt: skip
    if b.policy.entropy is not None:
        expected["entropy"] = b.policy.entropy[on]
    if b.rollout.topk is not None:
        expected |= {"topk_ids": b.rollout.topk.ids[on], "topk_logp": b.rollout.topk.logp[on]}
        expected["topk_tail"] = b.rollout.topk.tail_logp[on]
        expected["proximal_logp"] = b.rollout.proximal_logp[on]
    assert list(found) == [c.name for c in COLUMNS if c.name in expected]
    for name, x in expected.items():
        dtype = found[name].dtype
        assert torch.equal(found[name], x.to(dtype)), name
    assert 0 < found["kept"].sum() < len(found["kept"])
    assert trustrl.config_from_dict(found.region) == region


def test_a_token_takes_the_bytes_that_plans_count_on(tmp_path):
    region = trustrl.preset("dppo-topk-tv")
    made = recorder(tmp_path, region, topk=True, ring_steps=1)
    batches.give(made, batches.batch(region=region, k=20, proximal=True))
    ((_, parts),) = made.ring.steps()
    assert made.ring.nbytes == bytes_per_token(20) * sum(map(len, parts)) > 0


def test_kept_ids_are_lists_of_their_own_lengths(tmp_path):
    b = batches.batch()
    shape = (*b.rollout.in_loss.shape, 9)
    sizes = torch.arange(b.rollout.in_loss.numel()).reshape(b.rollout.in_loss.shape) % 9 + 1
    ids = torch.randint(500, shape, generator=torch.Generator().manual_seed(0))
    ids = ids.masked_fill(torch.arange(9) >= sizes.unsqueeze(-1), -1)
    b = b._replace(rollout=replace(b.rollout, kept_ids=ids))
    for name, wanted in (("with", True), ("without", False)):
        batches.give(recorder(tmp_path / name, kept_ids=wanted), b)
    assert "kept_ids" not in read(tmp_path / "without")
    assert torch.equal(read(tmp_path / "with")["kept_ids"], ids[b.rollout.in_loss].int())
    (file,) = (tmp_path / "with").glob("*.parquet")
    lists = pq.read_table(file, columns=["kept_ids"])["kept_ids"]
    assert [len(row) for row in lists] == sizes[b.rollout.in_loss].tolist()  # no padding in the file


def routed(seed=0, experts=6):
    """A batch from a mixture of three layers with two experts per token."""
    b = batches.batch(seed=seed)
    shape = (*b.rollout.in_loss.shape, experts)
    chosen = torch.randint(128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return b._replace(rollout=replace(b.rollout, experts=chosen))


@pytest.mark.parametrize("wanted", [True, False])
def test_routed_experts_are_a_column_if_asked_for(wanted, tmp_path):
    b = routed()
    made = recorder(tmp_path, experts=wanted, ring_steps=1)
    plain = recorder(tmp_path / "plain", ring_steps=1)
    batches.give(made, b)
    batches.give(plain, batches.batch())
    found = read(tmp_path)
    assert ("experts" in found) == wanted
    ((_, parts),) = made.ring.steps()
    more = made.ring.nbytes - plain.ring.nbytes
    assert more == (bytes_per_token(0, experts=6) - bytes_per_token(0) if wanted else 0) * sum(map(len, parts))
    if wanted:
        assert more == 12 * len(found["step"])  # two bytes for each of six
        assert torch.equal(found["experts"], b.rollout.experts[b.rollout.in_loss])


def test_experts_that_do_not_fit_the_tokens_are_refused():
    b = batches.batch()
    with pytest.raises(RecordError, match=r"RolloutTokens\.experts must be of shape"):
        replace(b.rollout, experts=torch.zeros(2, 3, dtype=torch.int16))
    with pytest.raises(RecordError, match=r"RolloutTokens\.experts must be an integer tensor"):
        replace(b.rollout, experts=torch.zeros(*b.rollout.in_loss.shape, 3))


def test_files_of_an_older_schema_are_read_without_the_columns_added_since(tmp_path):
    batches.give(recorder(tmp_path), batches.batch(), step=0)
    (file,) = tmp_path.glob("*.parquet")
    added = [column.name for column in COLUMNS if column.since > 1]
    assert "experts" in added
    rewritten(file, {**pq.read_table(file).schema.metadata, VERSION_KEY: b"1"}, drop=added)
    batches.give(recorder(tmp_path, experts=True), routed(), step=1)
    old, both = read(file), read(tmp_path)
    assert "experts" not in old
    assert len(both["step"].unique()) == 2
    assert (both["experts"][both["step"] == 0] == -1).all()
    assert sum(map(len, stream(file))) == len(old["step"])


def test_faults_are_recorded_as_they_were(tmp_path):
    b = batches.batch(at={(0, 0): float("nan"), (1, 0): -torch.inf})
    batches.give(recorder(tmp_path), b)
    logp = read(tmp_path)["policy_logp"]
    assert logp[0].isnan()
    assert (logp == -torch.inf).sum() == 1


def test_packed_tokens_are_numbered_within_their_sequence(tmp_path):
    ids = torch.tensor([7, 7, 9, 7, 9])
    rollout = trustrl.RolloutTokens(
        advantage=torch.ones(5), in_loss=torch.tensor([True, False, True, True, True]), behavior_logp=-torch.ones(5),
        sequence_ids=ids,
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=-torch.ones(5))
    out = trustrl.policy_loss(policy, rollout, batches.REGION, reduction=trustrl.TokenSum())
    batches.give(recorder(tmp_path), batches.Batch(out, policy, rollout, ids))
    found = read(tmp_path)
    assert found["sequence"].tolist() == [7, 9, 7, 9]
    assert found["position"].tolist() == [0, 0, 2, 1]


def test_a_folder_reads_as_all_its_files_in_order(tmp_path):
    one, two = recorder(tmp_path, rank=0), recorder(tmp_path, rank=1)
    for step in (5, 6):
        for made in (two, one):
            batches.give(made, batches.batch(seed=step), batches.batch(seed=step + 9, first=100), step=step)
    found = read(tmp_path)
    pairs = torch.stack([found["step"], found["rank"]], -1).unique_consecutive(dim=0).tolist()
    assert pairs == [[5, 0], [5, 1], [6, 0], [6, 1]]


def test_row_groups_are_bounded_and_the_file_says_what_was_left_off(tmp_path, monkeypatch):
    monkeypatch.setattr(record_writer, "ROWS_PER_GROUP", 50)
    many = [batches.batch(seed=seed, first=8 * seed) for seed in range(6)]
    tokens = sum(int(b.rollout.in_loss.sum()) for b in many)
    made = recorder(tmp_path, max_rows_per_step=tokens - 20)
    batches.give(made, *many)
    (file,) = tmp_path.glob("*.parquet")
    with pq.ParquetFile(file) as opened:
        sizes = [opened.metadata.row_group(at).num_rows for at in range(opened.metadata.num_row_groups)]
        counts = json.loads(opened.metadata.metadata[STEP_KEY])
    assert len(sizes) > 3
    assert max(sizes) <= 50
    assert counts == {"tokens_in_loss": tokens, "rows": sum(sizes)}
    assert tokens - 20 - 16 <= sum(sizes) <= tokens - 20
    found = read(file)
    for b in many:  # no sequence is cut
        for name, mask in zip(b.sequences.tolist(), b.rollout.in_loss, strict=True):
            assert (found["sequence"] == name).sum() in (0, mask.sum())


@pytest.mark.parametrize(
    ("room", "fitting"),
    [
        pytest.param(2, [], id="not even the first"),
        pytest.param(3, [7, 7, 7], id="the first, around the second"),
        pytest.param(4, [7, 7, 7], id="half of the second"),
        pytest.param(5, [7, 9, 7, 9, 7], id="two that interleave"),
    ],
)
def test_a_bound_on_rows_cuts_no_sequence_that_packed_tokens_interleave(room, fitting):
    packed = Rows(0, 0, 0, {"sequence": torch.tensor([7, 9, 7, 9, 7, 3])})
    assert packed.whole_sequences(room).columns["sequence"].tolist() == fitting


def test_the_same_sequences_are_in_at_every_update_and_on_every_rank(tmp_path):
    made = recorder(tmp_path, sample=0.3)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for update in range(3):
        b = batches.batch(seed=update, rows=64)
        b = b._replace(sequences=b.sequences[order] if update == 1 else b.sequences)
        made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=0, update=update)
    made.end_step(0, b.out.sums)
    found = read(tmp_path)
    by_update = [set(found["sequence"][found["update"] == update].tolist()) for update in range(3)]
    assert by_update[0] == by_update[1] == by_update[2]
    assert 10 <= len(by_update[0]) <= 30


def test_names_of_sequences_do_not_repeat():
    parts = [
        sequence_ids(step=step, rollout=rollout, rank=rank, count=500)
        for step in (0, 1, 2, 1000) for rollout in (0, 1) for rank in (0, 1, 127)
    ]  # fmt: skip
    every = torch.cat(parts)
    assert len(every.unique()) == len(every)
    assert every.min() >= 0
    assert torch.equal(parts[0], sequence_ids(step=0, rollout=0, rank=0, count=500))


def test_a_killed_writer_leaves_nothing_a_reader_trips_over(tmp_path):
    """The process dies in the middle of its second file; the next one clears up."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import recording_batches as batches
from trustrl.recording import Recorder, Recording, record_writer
record_writer.ROWS_PER_GROUP = 10
made = Recorder(Recording(folder={str(tmp_path)!r}, sample=1.0, triggers=()), batches.REGION, rank=0)
batches.give(made, batches.batch(), step=1)
for seed in range(3):
    b = batches.batch(seed=seed)
    made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(left) == 1  # it was writing
    assert set(read(tmp_path)["step"].tolist()) == {1}
    recorder(tmp_path, rank=1)
    assert left[0] in os.listdir(tmp_path)  # another rank's
    made = recorder(tmp_path)
    batches.give(made, batches.batch(), step=2)
    names = ["run.json", "step-00000001.rank-0000.parquet", "step-00000002.rank-0000.attempt-0002.parquet", "writers"]
    assert sorted(os.listdir(tmp_path)) == names
    assert set(read(tmp_path)["step"].tolist()) == {1, 2}


def test_a_process_that_begins_at_a_step_takes_back_what_its_rank_recorded_from_there_on(tmp_path):
    """Not only what it writes again: with other samples a repeated step may have no file."""
    fires = {"ring_steps": 2, "triggers": (QuantileAbove(of="log_ratio", level=0.0, at_most_every=2),)}
    for rank in (0, 1):
        made = recorder(tmp_path, rank=rank, **fires)
        for step in range(5):
            batches.give(made, batches.batch(seed=step), step=step)

    def files(rank):
        names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob(f"*.rank-{rank:04d}.*")]
        return sorted(name for name in names if not name.startswith("superseded/"))

    before, others = files(0), files(1)
    assert {"dump-00000002/trigger.rank-0000.json", "dump-00000004/trigger.rank-0000.json"} <= set(before)
    made = recorder(tmp_path, sample=0.0, **fires)
    assert files(0) == before
    b = batches.batch()
    made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=3)
    replaced = [name for name in before if name.split("/")[0].split(".")[0][-8:] >= "00000003"]
    assert files(0) == [name for name in before if name not in replaced]
    assert files(1) == others
    recorder(tmp_path, rank=1).add(b.out, b.policy, b.rollout, sequences=b.sequences, step=0)
    assert files(1) == [] != files(0)
    assert not (tmp_path / "dump-00000004").exists(), "a folder that nobody has files in"
    assert all((tmp_path / "superseded" / name).is_file() for name in replaced + others), "nothing is deleted"


def rewritten(path, metadata=None, drop=()):
    table = pq.read_table(path).drop_columns(list(drop))
    pq.write_table(table.replace_schema_metadata(metadata or table.schema.metadata), path)
    sealed(path)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        pytest.param(lambda p: p.write_bytes(b"PAR1 not really"), "complete Parquet file", id="no parquet"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-40]), "complete Parquet file", id="cut off"),
        pytest.param(lambda p: p.write_bytes(b""), "complete Parquet file", id="empty"),
        pytest.param(
            lambda p: pq.write_table(pa.table({"a": [1]}), p), "without a schema version", id="somebody else's"
        ),
        pytest.param(
            lambda p: rewritten(p, {VERSION_KEY: str(VERSION + 1).encode(), REGION_KEY: b"{}"}),
            "Install a newer trustrl",
            id="newer",
        ),
        pytest.param(lambda p: rewritten(p, {VERSION_KEY: b"new"}), "schema version b'new'", id="no number"),
        pytest.param(lambda p: rewritten(p, {VERSION_KEY: 9000 * b"9"}), "9,003 characters", id="long number"),
        pytest.param(lambda p: rewritten(p, drop=["weight"]), "column weight of type float", id="without a column"),
        pytest.param(
            lambda p: rewritten(p, {VERSION_KEY: b"1", REGION_KEY: b"3"}), "region's settings", id="no region"
        ),
        pytest.param(lambda p: p.unlink(), "No records found", id="missing"),
    ],
)
def test_foreign_and_newer_files_are_refused(break_it, says, tmp_path):
    batches.give(recorder(tmp_path), batches.batch())
    (file,) = tmp_path.glob("*.parquet")
    read(file)
    break_it(file)
    for path in (file, tmp_path):
        with pytest.raises(RecordError, match=says):
            read(path)


def test_files_of_two_regions_are_not_mixed(tmp_path):
    batches.give(recorder(tmp_path), batches.batch(), step=0)
    region = trustrl.preset("ppo")
    batches.give(recorder(tmp_path, region), batches.batch(region=region, proximal=True), step=1)
    with pytest.raises(RecordError, match="one region"):
        read(tmp_path)


def test_nothing_sampled_is_no_file(tmp_path):
    batches.give(recorder(tmp_path, sample=0.0), batches.batch())
    assert sorted(os.listdir(tmp_path)) == ["run.json", "writers"]


def test_a_full_disk_costs_the_steps_until_it_has_room_and_counts_their_tokens(tmp_path, monkeypatch):
    made = recorder(tmp_path, ring_steps=4)
    batches.give(made, batches.batch(), step=0)
    tokens = {step: int(batches.batch(seed=step).rollout.in_loss.sum()) for step in (1, 2)}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.warns(trustrl.errors.TrustRLWarning, match="No space left on device.* The records of step 1 and"):
            batches.give(made, batches.batch(seed=1), step=1)
        batches.give(made, batches.batch(seed=2), step=2)  # says nothing twice
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json", "step-00000000.rank-0000.parquet", "writers"]
    says = f"lack {tokens[1] + tokens[2]:,} tokens and 0 sequences of 2 steps, 1 to 2, until step 3, from which on"
    with pytest.warns(trustrl.errors.TrustRLWarning, match=says):
        batches.give(made, batches.batch(seed=3), step=3)
    assert read(tmp_path)["step"].unique().tolist() == [0, 3]
    assert [step for step, _ in made.ring.steps()] == [0, 1, 2, 3]


def test_a_file_that_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    made = recorder(tmp_path)

    def full(target, *_, **__):
        target.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", full)
    with pytest.warns(trustrl.errors.TrustRLWarning, match="No space left on device"):
        batches.give(made, batches.batch(), step=0)
    assert sorted(os.listdir(tmp_path)) == ["run.json", "writers"]


def test_a_dump_that_finds_no_room_says_so_and_recording_goes_on(tmp_path, monkeypatch):
    made = recorder(tmp_path, ring_steps=2, triggers=(trustrl.recording.NonFinite(at_most_every=1),))
    bad = batches.batch(at={(0, 0): float("nan")})

    def full(self, step, fired):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trustrl.recording.Recorder, "_dump", full)
        with pytest.warns(trustrl.errors.TrustRLWarning, match="Cannot write the dump of step 0 to .*No space left"):
            assert batches.give(made, bad, step=0) == []
    (folder,) = batches.give(made, bad, step=1)
    assert read(folder)["step"].unique().tolist() == [0, 1]
    assert read(tmp_path)["step"].unique().tolist() == [0, 1]


def test_sequences_must_be_named_one_by_one(tmp_path):
    b = batches.batch()
    with pytest.raises(RecordError, match="sequences must be of shape"):
        recorder(tmp_path).add(b.out, b.policy, b.rollout, sequences=b.sequences[:3], step=0)


def test_nothing_of_the_graph_or_the_trainers_memory_is_kept(tmp_path):
    b = batches.batch()
    made = recorder(tmp_path, ring_steps=2)
    made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=0)
    with torch.no_grad():
        b.policy.logp.fill_(-50.0)  # a trainer may reuse its buffers
        b.rollout.token_ids.fill_(0)
        b.rollout.in_loss.fill_(False)
    made.end_step(0, b.out.sums)
    found = read(tmp_path)
    assert found["policy_logp"].min() > -50
    assert found["token_id"].min() >= 100
    for _, parts in made.ring.steps():
        assert not any(x.requires_grad for rows in parts for x in rows.columns.values())


def test_without_pyarrow_the_package_imports_and_says_what_to_install(tmp_path):
    code = f"""
import sys
sys.modules["pyarrow"] = None
from trustrl.errors import MissingPackageError
from trustrl.recording import Recorder, Recording, read
import trustrl
for work in (lambda: read({str(tmp_path)!r}), lambda: Recorder(Recording(folder={str(tmp_path)!r}), trustrl.preset("ppo"), rank=0)):
    try:
        work()
    except MissingPackageError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count('pip install "trustrl[records]"') == 2
    assert issubclass(MissingPackageError, ImportError)


def test_the_core_does_not_import_pyarrow():
    code = "import sys, trustrl, trustrl.recording; assert not any(m.startswith('pyarrow') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)


def test_settings_and_triggers_load_without_torch():
    code = "import sys, trustrl.recording as r; r.Recording(folder='x'); assert 'torch' not in sys.modules; r.Recorder"
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)
