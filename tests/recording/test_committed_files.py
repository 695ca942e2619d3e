"""Files of a record that a checkpoint covers: their listing, what counts as lost, and files that compaction replaced."""

import pytest

from support.record_names import part_name
from trustrl.files import hashed
from trustrl.recording.committed_files import fault_of_file, files_of_steps
from trustrl.recording.rank_writer import RankWriter
from trustrl.recording.writers import Claim

pq = pytest.importorskip("pyarrow.parquet")
import pyarrow as pa

from trustrl.recording import checksums


def record(folder, steps, ranks=2):
    for inside in ("", "sequences", "texts"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
        for step in steps:
            for rank in range(ranks):
                (folder / inside / part_name(step, rank)).write_text(f"{inside} {step} {rank}")


def test_the_files_of_steps_are_those_of_all_tables_and_ranks_and_of_dumps(tmp_path):
    record(tmp_path, range(4))
    for step in (0, 2):
        (tmp_path / f"dump-{step:08d}").mkdir()
        (tmp_path / f"dump-{step:08d}" / part_name(step, 1)).write_text("x")
        (tmp_path / f"dump-{step:08d}" / f".{part_name(step, 0)}.tmp").write_text("unfinished")
    (tmp_path / "run.json").write_text("{}")
    assert sorted(files_of_steps(tmp_path, range(2, 4))) == [
        "dump-00000002/step-00000002.rank-0001.parquet",
        *(f"{inside}step-{step:08d}.rank-{rank:04d}.parquet" for inside in ("sequences/",) for step in (2, 3) for rank in (0, 1)),
        *(f"step-{step:08d}.rank-{rank:04d}.parquet" for step in (2, 3) for rank in (0, 1)),
        *(f"texts/step-{step:08d}.rank-{rank:04d}.parquet" for step in (2, 3) for rank in (0, 1)),
    ]  # fmt: skip
    assert files_of_steps(tmp_path / "nowhere", range(9)) == {}


def test_a_merged_file_and_the_claim_of_its_writer_are_covered_and_replaced_files_are_not(tmp_path):
    record(tmp_path, range(6), ranks=1)
    compacted(tmp_path / "step-00000000-00000003.rank-0000.parquet")
    (tmp_path / "step-00000004.rank-0000.attempt-0002.parquet").write_text("recorded again")
    claim = Claim(rank=0, attempt=0, from_step=4, in_effect=False)
    made = RankWriter.begin(tmp_path, claim).claim
    assert made.attempt == 3
    (tmp_path / "step-00000004.rank-0000.attempt-0003.parquet").write_text("and again")
    assert sorted(name for name in files_of_steps(tmp_path, range(3, 5)) if "/step" not in name) == [
        "step-00000000-00000003.rank-0000.parquet",
        "step-00000004.rank-0000.attempt-0003.parquet",
        "writers/rank-0000.attempt-0003.json",
    ]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "has changed since it was committed"),
        (lambda file: file.write_bytes(b""), "has 0 bytes, but 4 were committed"),
    ],
    ids=["missing", "zeroed", "empty"],
)
def test_a_lost_file_is_named(tmp_path, damage, said):
    record(tmp_path, [0])
    name = part_name(0, 1)
    listed = hashed(tmp_path / name)
    assert fault_of_file(tmp_path, name, listed) is None
    damage(tmp_path / name)
    assert fault_of_file(tmp_path, name, listed) == said


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "texts/../../secret"])
def test_a_name_that_leads_out_of_the_record_is_not_opened(tmp_path, name):
    (tmp_path / "secret").write_text("x")
    assert fault_of_file(tmp_path / "records", name, hashed(tmp_path / "secret")) == "is not in the record"


def compacted(file):
    pq.write_table(pa.table({"step": [2, 3, 4], "weight": [0.5, 1.0, 2.0]}), file)
    with file.open("r+b") as opened:
        checksums.seal(opened)


def test_a_part_that_compaction_replaced_is_not_lost_while_the_whole_file_is_intact(tmp_path):
    record(tmp_path, [2])
    name = part_name(2, 1)
    listed = hashed(tmp_path / name)
    (tmp_path / name).unlink()
    for other in ("step-00000000-00000001.rank-0001", "step-00000002-00000004.rank-0000", "step-2-4.rank-0001"):
        compacted(tmp_path / f"{other}.parquet")
        assert fault_of_file(tmp_path, name, listed) == "is missing", other
    whole = tmp_path / "step-00000002-00000004.rank-0001.parquet"
    compacted(whole)
    assert fault_of_file(tmp_path, name, listed) is None
    assert fault_of_file(tmp_path, f"texts/{part_name(2, 7)}", listed) == "is missing", "another table"
    content = bytearray(whole.read_bytes())
    content[20] ^= 1
    whole.write_bytes(content)
    assert "was merged into step-00000002" in fault_of_file(tmp_path, name, listed)
    pq.write_table(pa.table({"step": [2]}), whole)
    assert "has no checksums" in fault_of_file(tmp_path, name, listed)
