"""Small files with huge contents: each is read, or left out with a sentence, within 2 GB and a minute."""

import os
import re
import resource
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")
pytest.importorskip("yaml")

from support.hostile_files import FILES

READ = """
import sys, warnings
from trustrl.runs.open_run import open_run
from trustrl.errors import TrustRLError
warnings.simplefilter("always")
try:
    run = open_run(sys.argv[1])
    print(*run.faults, sep="\\n")
    print(sum(1 for _ in run.completions()), "completions")
    for folder in run.records:
        from trustrl.recording import stream
        from trustrl.recording.record_files import part_files
        print(sum(len(piece) for piece in stream(part_files(folder))), "tokens")
except TrustRLError as error:
    print(error)
"""

MEMORY, SECONDS = 1_900_000_000, 60


def _bounded():
    """Keeps a test that fails from taking the machine with it."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def run(*command, folder, **more):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ARROW_DEFAULT_MEMORY_POOL": "system", **more}
    process = subprocess.Popen(
        [sys.executable, *command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=_bounded, env=environment,
    )  # fmt: skip
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, said, used


QUICK = (
    "repeated rows (Parquet)", "repeated tokens (record)", "expanded tensor (.pt)", "many objects (JSON)",
    "endless view (SQLite)", "generated column (SQLite)", "huge lengths (W&B)", "giant field (CSV)",
)  # fmt: skip
"""Files that every run of the tests reads; `nox -s fuzz` reads all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FILES]
)
def test_a_reader_counts_before_it_decodes(name, tmp_path):
    """From Python, without the child process of the command line."""
    write, words = FILES[name]
    write(tmp_path / "run")
    code, said, used = run("-c", READ, folder=tmp_path / "run")
    assert code == 0, said[-2000:]
    assert "Traceback" not in said
    assert re.search(words, said), said[-2000:]
    assert used.ru_maxrss * 1024 < MEMORY
    assert used.ru_utime + used.ru_stime < SECONDS


def test_a_slime_folder_with_one_dump_is_recognized(tmp_path):
    import torch

    from trustrl.runs.open_run import open_run

    (tmp_path / "rollout_data").mkdir()
    sample = {"prompt": "p", "response": "r", "response_length": 1, "tokens": [1, 2], "reward": 1.0}
    torch.save({"rollout_id": 3, "samples": [sample]}, tmp_path / "rollout_data/3.pt")
    for path in (tmp_path, tmp_path / "rollout_data", tmp_path / "rollout_data/3.pt"):
        assert [completion.step for completion in open_run(path).completions()] == [3]


def test_the_factor_raises_a_limit(tmp_path, monkeypatch):
    from trustrl.files import parsed_json
    from trustrl.limits import OverLimit

    text = b"[" + b"0," * 16_000_000 + b"0]"
    with pytest.raises(
        OverLimit, match=r"1,184,000,\d+ bytes of memory, and the limit is 1,000,000,000. Set TRUSTRL_READ_L"
    ):
        parsed_json(text)
    monkeypatch.setenv("TRUSTRL_READ_LIMITS", "2")
    with pytest.raises(ValueError, match="more than 10,000,000 values"):
        parsed_json(text)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("kind", ["none", "zstd", "snappy"])
def test_the_count_of_a_parquet_file_is_never_below_what_it_takes(kind, version):
    """Against pyarrow itself, for files of every layout."""
    import io
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    from trustrl.recording.decoded_size import decoded_sizes

    draw, num = random.Random(f"{kind}{version}"), 3000
    table = pa.table(
        {
            "text": [draw.choice(["abc", "d" * 500, None]) for _ in range(num)],
            "list": [[1.5] * draw.randrange(5) for _ in range(num)],
            "messages": [[{"role": "u", "content": "x" * draw.randrange(100)}] * draw.randrange(3) for _ in range(num)],
            "flag": [True, None] * (num // 2), "null": pa.nulls(num, pa.float32()), "int": list(range(num)),
        }
    )  # fmt: skip
    for more in (
        {},
        {"use_dictionary": False},
        {"data_page_size": 500},
        {"row_group_size": 777, "write_page_checksum": True},
    ):
        file = io.BytesIO()
        pq.write_table(table, file, compression=kind, data_page_version=version, **more)
        metadata = pq.read_metadata(file)
        for enough in (1e9, 1e5):  # with the texts as counted, and as measured
            sizes = decoded_sizes(file, metadata, enough)
            assert table.nbytes <= sizes.arrow or enough < table.nbytes
            assert sizes.python > sizes.arrow


def test_pages_that_hold_more_than_the_footer_states_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trustrl.recording.decoded_size import check_rows

    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(50))}), file, use_dictionary=False, compression="none")
    data = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(0).column(0)
    start = column.data_page_offset
    place = data.index(b"\x2c\x15\x64", start, start + 30) + 2  # DataPageHeader.num_values = 50, as a zigzag integer
    data[place] = 2 * 60
    file.write_bytes(data)
    with file.open("rb") as opened, pytest.raises(OSError, match=r"its pages have 60 values .* footer states 50"):
        check_rows(opened)
