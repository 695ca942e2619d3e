"""Several processes in one folder: resumed runs, fewer ranks, other runs, and two processes of one rank."""

import json
import os
import warnings
from time import sleep

import pytest

pq = pytest.importorskip("pyarrow.parquet")

import torch

import trustrl
from support import recording_batches as batches
from support.run_folders import run_folder, sealed
from trustrl.cli import main
from trustrl.errors import RecordError, TrustRLWarning
from trustrl.recording import Recorder, Recording, compaction, read, read_sequences, read_texts
from trustrl.recording.part_names import PartName
from trustrl.recording.rank_writer import RankWriter, retire_rank
from trustrl.recording.record_check import check_record
from trustrl.recording.record_files import part_files
from trustrl.recording.writers import Claims
from trustrl.runs.open_run import open_run
from trustrl.runs.readers import files as run_files, record_tables
from trustrl.runs.readers.record_tables import completions


def recorder(folder, rank=0, region=batches.REGION, *, run=None, world_size=None, **more):
    usual = {"sample": 1.0, "ring_steps": 0, "triggers": ()}
    return Recorder(Recording(folder=folder, **usual | more), region, rank=rank, run=run, world_size=world_size)


def record(made, steps, *, seed=0, rank=0):
    """Sequence ids tell steps, ranks and seeds apart."""
    for step in steps:
        first = 1_000_000 * seed + 1000 * step + 100 * rank
        b = batches.batch(seed=seed + step, first=first)
        made.add_sequences(batches.sequence_rows(range(first, first + 8)), step=step)
        batches.give(made, b, step=step)
    return made


def steps_by_rank(folder):
    found = read(folder)
    return {rank: sorted(set(found["step"][found["rank"] == rank].tolist())) for rank in set(found["rank"].tolist())}


def seeds(folder):
    return {one // 1_000_000 for one in read(folder)["sequence"].tolist()}


def superseded(folder):
    return sorted(str(path.relative_to(folder / "superseded")) for path in (folder / "superseded").rglob("*.parquet"))


def test_a_second_run_in_the_folder_deletes_nothing_and_says_where_the_first_is(tmp_path):
    record(recorder(tmp_path), range(10))
    before = read(tmp_path).table
    with pytest.warns(TrustRLWarning, match=r"had a whole record from step 0 on.*superseded/.*its own folder"):
        record(recorder(tmp_path, region=trustrl.preset("ppo"), world_size=1), range(3), seed=5)
    assert seeds(tmp_path) == {5}
    assert steps_by_rank(tmp_path) == {0: [0, 1, 2]}
    assert len(superseded(tmp_path)) == 30
    assert read(tmp_path / "superseded").table.equals(before)
    assert check_record(tmp_path).superseded == 30


def test_a_folder_of_another_run_is_refused_before_training(tmp_path):
    record(recorder(tmp_path, run="a" * 32), range(3))
    names = sorted(os.listdir(tmp_path))
    for rank in (0, 1):
        with pytest.raises(RecordError, match=r"got those of run a{32}\. Pass another folder"):
            recorder(tmp_path, rank, run="b" * 32)
    assert sorted(os.listdir(tmp_path)) == names
    record(recorder(tmp_path, run="a" * 32), range(2, 4))
    assert steps_by_rank(tmp_path) == {0: [0, 1, 2, 3]}


def test_a_run_directory_gives_its_records_its_name(tmp_path):
    (tmp_path / "run_id").write_text("c" * 32 + "\n")
    recorder(tmp_path / "records")
    assert json.loads((tmp_path / "records" / "run.json").read_text())["run"] == "c" * 32
    (tmp_path / "run_id").write_text("d" * 32 + "\n")
    with pytest.raises(RecordError, match="Pass another folder"):
        recorder(tmp_path / "records")


def test_four_ranks_that_continue_as_two_leave_no_stale_part(tmp_path):
    for rank in range(4):
        record(recorder(tmp_path, rank, world_size=4), range(6), rank=rank)
    for rank in range(2):
        record(recorder(tmp_path, rank, world_size=2), range(3, 8), seed=9, rank=rank)
    expected = {0: list(range(8)), 1: list(range(8)), 2: [0, 1, 2], 3: [0, 1, 2]}
    assert steps_by_rank(tmp_path) == expected
    assert len([name for name in superseded(tmp_path) if "/" not in name]) == 4 * 3
    assert check_record(tmp_path).is_valid
    for rank in range(3):  # and then as three
        record(recorder(tmp_path, rank, world_size=3), range(5, 7), seed=11, rank=rank)
    assert steps_by_rank(tmp_path) == {0: list(range(7)), 1: list(range(7)), 2: [0, 1, 2, 5, 6], 3: [0, 1, 2]}


def test_a_rank_that_records_no_more_among_as_many_ranks_leaves_no_stale_part(tmp_path):
    for rank in (0, 1):
        record(recorder(tmp_path, rank, world_size=4), range(6), rank=rank)
    record(recorder(tmp_path, world_size=4), range(3, 8), seed=9)
    for rank in (1, 2, 3):
        retire_rank(tmp_path, rank, from_step=3)
    assert steps_by_rank(tmp_path) == {0: list(range(8)), 1: [0, 1, 2]}
    assert {claim.rank for claim in Claims.of(tmp_path)} == {0, 1}
    record(recorder(tmp_path, 1, world_size=4), range(6, 8), rank=1)  # and then as before
    assert steps_by_rank(tmp_path)[1] == [0, 1, 2, 6, 7]
    (tmp_path / "writers" / "rank-0001.attempt-0001.json").write_text("{}")
    with pytest.warns(TrustRLWarning, match=r"Cannot end the record of rank 1 .* Its files from step 9 on still count"):
        retire_rank(tmp_path, 1, from_step=9)


def test_two_recorders_of_one_rank_do_not_mix_and_the_earlier_one_says_who_took_over(tmp_path):
    earlier, later = recorder(tmp_path), recorder(tmp_path)
    for step in range(5):
        for made, seed in ((earlier, 0), (later, 50)):
            b = batches.batch(seed=seed + step, first=1_000_000 * seed + 1000 * step)
            made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=step)
        if step == 0:
            with pytest.warns(TrustRLWarning, match=f"Another process took over rank 0: process {os.getpid()} on"):
                earlier.end_step(step, None)
        earlier.end_step(step, None)
        later.end_step(step, None)
    assert seeds(tmp_path) == {50}
    assert steps_by_rank(tmp_path) == {0: [0, 1, 2, 3, 4]}


def test_a_process_of_a_rank_that_was_retired_stops(tmp_path):
    stale = record(recorder(tmp_path, 1, world_size=2), range(3), rank=1)
    record(recorder(tmp_path, world_size=1), range(2, 4))
    with pytest.warns(TrustRLWarning, match="continues on 1 ranks without rank 1"):
        record(stale, [3], rank=1)
    assert steps_by_rank(tmp_path) == {0: [2, 3], 1: [0, 1]}


def test_merged_files_hold_the_same_tables_and_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "BLOCKS", (4, 16))
    plain, small = tmp_path / "plain", tmp_path / "small"
    before = {}
    for folder, blocks in ((plain, (10**6, 10**7)), (small, (4, 16))):
        monkeypatch.setattr("trustrl.recording.rank_writer.BLOCKS", blocks)
        for rank in range(2):
            made = recorder(folder, rank)
            for step in range(24):
                record(made, [step], rank=rank)
                assert made._writer.wait() is None
        before[folder] = [read(folder).table, read_sequences(folder).drop_columns("text")]
    assert all(one.equals(other) for one, other in zip(*before.values(), strict=True))
    names = [file.name for file in part_files(small) if "rank-0000" in file.name]
    assert names == [
        "step-00000000-00000015.rank-0000.parquet", "step-00000016-00000019.rank-0000.parquet",
        "step-00000020-00000023.rank-0000.parquet",
    ]  # fmt: skip
    assert len(list(small.rglob("*.parquet"))) == 3 * 2 * 3
    assert sorted(read_texts(small)["completion"].to_pylist()) == sorted(read_texts(plain)["completion"].to_pylist())
    checked = check_record(small)
    assert checked.findings == []
    assert checked.rows["tokens"] == len(read(plain)["step"])
    # The plain glob of the specification reads the same.
    import pyarrow.dataset as ds

    globbed = ds.dataset([str(path) for path in small.glob("step-*.parquet")]).to_table()
    assert len(globbed) == len(read(plain)["step"])


def test_a_run_that_resumes_inside_a_merged_file_keeps_the_steps_before(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "BLOCKS", (4, 16))
    monkeypatch.setattr("trustrl.recording.rank_writer.BLOCKS", (4, 16))
    made = recorder(tmp_path)
    for step in range(8):
        record(made, [step])
        assert made._writer.wait() is None
    resumed = record(recorder(tmp_path), range(6, 9), seed=3)
    assert resumed._writer.wait() is None  # it merges in the background, and a file may move while it is checked
    found = read(tmp_path)
    by_step = {
        step: {one // 1_000_000 for one in found["sequence"][found["step"] == step].tolist()} for step in range(9)
    }
    assert by_step == {step: {0} if step < 6 else {3} for step in range(9)}
    assert len(read_sequences(tmp_path)) == len(read_texts(tmp_path)) == 9 * 8
    assert superseded(tmp_path)[-1].endswith("texts/step-00000004-00000007.rank-0000.parquet")
    assert check_record(tmp_path).is_valid


def test_steps_of_a_dump_keep_their_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "BLOCKS", (4, 16))
    made = recorder(tmp_path, ring_steps=2, triggers=(trustrl.recording.NonFinite(),))
    record(made, range(2))
    batches.give(made, batches.batch(at={(0, 0): -torch.inf}, first=2000), step=2)
    record(made, range(3, 8))
    before = read(tmp_path).table
    assert main(["records", "compact", str(tmp_path)]) == 0
    names = ["step-00000000", "step-00000001", "step-00000002", "step-00000003-00000007"]
    assert [file.name.partition(".")[0] for file in part_files(tmp_path)] == names
    assert read(tmp_path).table.equals(before)


def test_a_report_opens_records_of_more_files_than_other_runs_may_have(tmp_path, monkeypatch):
    run = run_folder(tmp_path / "run", region="dppo-binary-tv")
    record(recorder(run / "records"), range(15))
    monkeypatch.setattr(run_files, "MOST_FILES", 10)
    for path in (run, run / "records"):
        assert any("token records" in found and "15 files" in found for found in open_run(path).found)
    assert len(list(open_run(run / "records").completions())) == 120


def test_completions_of_a_run_that_merges_meanwhile_come_once_each(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "ROW_GROUPS", dict.fromkeys(compaction.ROW_GROUPS, (16, 2**20)))
    record(recorder(tmp_path), range(8))
    record(recorder(tmp_path, 1), range(8), rank=1)
    reading = completions(str(tmp_path))
    found = [next(reading) for _ in range(40)]
    monkeypatch.setattr(compaction, "BLOCKS", (2, 4))
    assert compaction.compact_record(tmp_path) == (48, 12)
    found += reading
    assert len(found) == len({one.sequence for one in found}) == 128
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert found == list(completions(str(tmp_path)))
    texts = read_texts(tmp_path)
    told = dict(zip(texts["sequence"].to_pylist(), texts["completion"].to_pylist(), strict=True))
    assert {one.sequence: one.text for one in found} == told


def test_texts_in_another_order_than_their_sequences_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(record_tables, "_ROWS", 3)
    record(recorder(tmp_path), range(4))
    monkeypatch.setattr(compaction, "BLOCKS", (4,))
    monkeypatch.setattr(compaction, "ROW_GROUPS", dict.fromkeys(compaction.ROW_GROUPS, (8, 2**20)))
    compaction.compact_record(tmp_path)
    told = {one.sequence: one.text for one in completions(str(tmp_path))}
    assert None not in told.values()
    (file,) = (tmp_path / "texts").iterdir()
    table = pq.read_table(file)
    for rows in (table.take(list(range(31, -1, -1))), table.take(list(range(0, 32, 2)))):
        pq.write_table(rows.replace_schema_metadata(table.schema.metadata), file, row_group_size=5)
        sealed(file)
        kept = set(rows["sequence"].to_pylist())
        found = {one.sequence: one.text for one in completions(str(tmp_path))}
        assert found == {sequence: text if sequence in kept else None for sequence, text in told.items()}


def test_steps_that_are_faster_than_merging_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "BLOCKS", (4, 16))
    monkeypatch.setattr("trustrl.recording.rank_writer.BLOCKS", (4, 16))
    monkeypatch.setattr("trustrl.recording.rank_writer.MOST_UNMERGED", 8)
    merge = RankWriter._compact

    def slow(writer, before):
        sleep(0.3)
        return merge(writer, before)

    monkeypatch.setattr(RankWriter, "_compact", slow)
    made, most = recorder(tmp_path), 0
    for step in range(60):
        record(made, [step])
        most = max(most, sum(not PartName.of(file.name).is_merged for file in tmp_path.glob("step-*.parquet")))
    assert made._writer.wait() is None
    assert most <= 8 + 8 + 4  # merged, ended meanwhile, and a block that has not ended
    assert steps_by_rank(tmp_path) == {0: list(range(60))}


def test_what_a_later_process_replaced_is_counted(tmp_path, capsys):
    run = run_folder(tmp_path / "run", region="dppo-binary-tv")
    record(recorder(run / "records"), range(6))
    record(recorder(run / "records"), range(4, 6), seed=1)
    assert any("2 files that a later process replaced" in found for found in open_run(run).found)
    assert main(["records", "check", str(run)]) == 0
    assert "6 superseded files" in capsys.readouterr().err


def test_a_damaged_claim_is_named(tmp_path):
    record(recorder(tmp_path), range(2))
    (claim,) = (tmp_path / "writers").iterdir()
    claim.write_bytes(claim.read_bytes().replace(b'"from_step": 0', b'"from_step": 1'))
    with pytest.raises(RecordError, match=r"rank-0000\.attempt-0001\.json` must be the claim of a writer"):
        read(tmp_path)
    assert not check_record(tmp_path).is_valid
    claim.unlink()
    assert steps_by_rank(tmp_path) == {0: [0, 1]}


def test_a_claim_that_was_never_written_counts_for_nothing(tmp_path):
    record(recorder(tmp_path), range(2))
    (tmp_path / "writers" / "rank-0000.attempt-0002.json").touch()
    assert steps_by_rank(tmp_path) == {0: [0, 1]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(recorder(tmp_path), range(1, 3))
    assert steps_by_rank(tmp_path) == {0: [0, 1, 2]}
    assert Claims.of(tmp_path).latest(0).attempt == 3
