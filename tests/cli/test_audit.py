"""`trustrl audit` and `trustrl calibrate`: exit codes, stdout for data, stderr for talk."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from support import recorded, run_folders as folders
from trustrl.cli import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    recorded.record(folder / "records")
    return folder


def test_an_audit_is_one_object_on_stdout(run_folder, capsys):
    assert main(["audit", str(run_folder), "--regions", "ppo,troll", "--json", "--top", "2"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert found["reproduced"]["kept_differs"] == 0
    assert list(found["regions"]) == ["recorded", "ppo", "troll"]
    assert found["regions"]["troll"]["how"] == "left out"
    assert len(found["tokens"]["ppo"]) == 2


def test_an_audit_for_people_names_arms_from_a_file(run_folder, tmp_path, capsys):
    arms = tmp_path / "arms.toml"
    arms.write_text('[tight]\npreset = "dppo-binary-tv"\ndivergence.max_increase = 0.05\n')
    assert main(["audit", str(run_folder), "--arms", str(arms), "--regions", "tight,ppo"]) == 0
    shown = capsys.readouterr().out
    assert "tight" in shown
    assert "differs at 0 of" in shown


def test_records_that_contradict_their_region_end_with_1(run_folder, tmp_path, capsys):
    file = next((run_folder / "records").glob("*.parquet"))
    table = pq.read_table(file)
    flipped = [not kept for kept in table["kept"].to_pylist()]
    at = table.schema.get_field_index("kept")
    changed = table.set_column(at, table.schema.field("kept"), pa.chunked_array([pa.array(flipped)]))
    pq.write_table(changed, tmp_path / file.name)
    folders.sealed(tmp_path / file.name)
    assert main(["audit", str(tmp_path)]) == 1
    assert "must reproduce the records" in capsys.readouterr().err


def test_few_tokens_end_a_calibration_with_1_and_the_curves_all_the_same(run_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "curves.png"
    assert main(["calibrate", str(run_folder), "--json", "--figure", str(figure)]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["statistics"]["tv"]["recommended"] is None
    assert found["statistics"]["tv"]["curve"]
    assert figure.exists()
    assert str(figure) in said.err


def test_ctrl_c_ends_an_audit_and_its_workers_without_a_traceback(run_folder):
    """It comes while workers load torch, as it reaches all processes of a terminal."""
    code = (
        "import os, signal, sys, threading\nfrom trustrl.tools.audit import mapreduce\nfrom trustrl.cli import main\n"
        "def begun(*given):\n"
        "    threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()\n"
        "    return started(*given)\n"
        "started, mapreduce._in_processes = mapreduce._in_processes, begun\n"
        # Whoever started the tests in the background may have turned it off for all of them.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "audit", str(run_folder), "--workers", "2"],
        capture_output=True, text=True, check=False, start_new_session=True, timeout=300,
    )  # fmt: skip
    assert (process.returncode, process.stdout, process.stderr) == (1, "", "error: Interrupted.\n")


@pytest.mark.parametrize("verb", ["audit", "calibrate"])
def test_a_damaged_page_of_a_file_ends_with_1_and_a_sentence(verb, run_folder, tmp_path, capsys):
    file = next((run_folder / "records").glob("*.parquet"))
    start = min(pq.ParquetFile(file).metadata.row_group(0).column(at).data_page_offset for at in range(5))
    text = bytearray(file.read_bytes())
    text[start : start + 40] = bytes(40)
    (tmp_path / file.name).write_bytes(text)
    assert main([verb, str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "must be a complete Parquet file" in said.err
    assert not said.err.endswith("..\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["audit"], 2, "RECORDS", id="no records named"),
        pytest.param(["audit", "nowhere"], 2, "must be existing folders or files", id="no such folder"),
        pytest.param(["calibrate", "nowhere"], 2, "existing folders", id="no such folder to calibrate from"),
        pytest.param(["audit", "EMPTY"], 1, "No records found", id="a folder without records"),
        pytest.param(["audit", "SILENT"], 1, "this run has no records", id="a run that recorded nothing"),
        pytest.param(["calibrate", "SILENT"], 1, "records.sample=0.1", id="nor anything to calibrate from"),
        pytest.param(["audit", "RUN", "--regions", "pppo"], 2, "Did you mean 'ppo'?", id="an unknown region"),
        pytest.param(
            ["audit", "RUN", "--regions", ","], 2, "--regions must name presets", id="no region between commas"
        ),
        pytest.param(["audit", "RUN", "--arms", "ARMS"], 2, "--arms must have a table", id="an empty file of arms"),
        pytest.param(["audit", "RUN", "--workers", "0"], 2, "--workers", id="no worker"),
        pytest.param(["audit", "RUN", "--top", "-1"], 2, "--top", id="fewer than none"),
        pytest.param(
            ["calibrate", "RUN", "--figure", "nowhere/a.png"], 2, "must be a writable file", id="no such folder for it"
        ),
        pytest.param(["calibrate", "RUN", "--figure", "curves.xyz"], 2, "--figure", id="no picture of this kind"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(arguments, code, said, run_folder, tmp_path, capsys):
    (tmp_path / "arms.toml").touch()
    places = {
        "ARMS": str(tmp_path / "arms.toml"),
        "RUN": str(run_folder),
        "EMPTY": str(tmp_path),
        "SILENT": str(folders.run_folder(tmp_path / "a")),
    }
    assert main([places.get(one, one) for one in arguments]) == code
    found = capsys.readouterr()
    assert said in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("verb", "flag", "package"), [("audit", "--ray", "ray"), ("audit", "--tokenizer=x", "transformers")]
)
def test_a_missing_package_is_named(verb, flag, package, run_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([verb, str(run_folder), flag]) == 1
    assert "pip install" in capsys.readouterr().err
