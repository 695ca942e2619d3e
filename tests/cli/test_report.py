"""`trustrl report`: data on stdout, talk on stderr, exit codes."""

import errno
import json
import os
import subprocess
import sys

import pytest

from support.run_folders import run_folder, steps, write_records
from trustrl.cli import main


def test_a_summary_goes_to_stdout(tmp_path, capsys):
    assert main(["report", str(run_folder(tmp_path / "a"))]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("small: finished, step 8 of 8")
    assert said.err == ""


def test_json_is_the_summary_as_data(tmp_path, capsys):
    folders = [
        run_folder(tmp_path / "a", name="s-a"),
        run_folder(tmp_path / "b", name="s-b", rows=steps(8)[:2], finished=False),
    ]
    assert main(["report", *map(str, folders), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["status"], first["accuracy_after"], first["metrics"]["reward"]["last"]) == ("finished", 0.75, 1.0)
    assert (second["status"], second["steps"], second["tokens"]) == ("unfinished", 2, None)


def test_a_page_is_written_and_its_path_printed(tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(run_folder(tmp_path / "a")), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<!doctype html>")


def test_a_page_and_json_go_together(tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(run_folder(tmp_path / "a")), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "small"
    assert out.exists()


def test_records_that_cannot_be_read_end_with_1_and_the_rest_of_the_report(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    folder = run_folder(tmp_path / "a")
    (folder / "records").mkdir()
    (folder / "records" / "step-00000000.rank-0000.parquet").write_bytes(b"no Parquet")
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr()
    assert "Cannot read the records" in said.err
    assert "small: finished" in said.out


def test_records_without_pyarrow_name_the_extra(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pyarrow")
    folder = run_folder(tmp_path / "a")
    write_records(folder / "records", {"token_id": [1]})
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(folder)]) == 1
    assert "trustrl[records]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "RUN", id="no run"),
        pytest.param(["nowhere"], "must be a folder or file that exists", id="no folder"),
    ],
)
def test_wrong_usage_ends_with_2(arguments, said, capsys):
    assert main(["report", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "said"),
    [
        pytest.param("folder", "Is a directory", id="a folder"),
        pytest.param("file/page.html", "Not a directory", id="below a file"),
        pytest.param("file/new/page.html", "Not a directory", id="further below a file"),
    ],
)
def test_a_page_that_cannot_be_written_ends_with_2_and_leaves_nothing_behind(out, said, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    folder = run_folder(tmp_path / "a")
    before = sorted(tmp_path.iterdir())
    assert main(["report", str(folder), "--out", str(tmp_path / out)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: --out must be a writable file, got ")
    assert said in found.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_fails_while_the_page_is_written_ends_with_2(tmp_path, monkeypatch, capsys):
    def full(file, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trustrl.files.write_whole", full)
    assert main(["report", str(run_folder(tmp_path / "a")), "--out", str(tmp_path / "page.html")]) == 2
    assert "No space left" in capsys.readouterr().err


def test_a_page_and_an_audit_say_the_same_share(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    pytest.importorskip("torch")
    folder = run_folder(tmp_path / "a")
    columns = {"advantage": [1.0] * 8 + [0.0] * 8, "kept": [False] * 2 + [True] * 6 + [False] * 8, "token_id": [5] * 16}
    write_records(folder / "records", columns)
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "16 recorded tokens × updates, 8 with A ≠ 0: 75.0% kept, 25.0% masked, 8 no gradient." in page
    assert "<td>5</td><td>2</td><td>8</td><td>25.0%</td>" in page
    capsys.readouterr()
    main(["audit", str(folder), "--regions", "ppo", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["regions"]["recorded"]["stopped_share"] == 0.25
    assert found["signed"] == 8


def test_a_run_without_metrics_says_so(tmp_path, capsys):
    assert main(["report", str(run_folder(tmp_path / "a", rows=[], evaluations=(), finished=False))]) == 0
    assert "has no metrics: it ended before its first step" in capsys.readouterr().out


def test_a_broken_file_ends_with_1(tmp_path, capsys):
    folder = run_folder(tmp_path / "a")
    (folder / "metrics.jsonl").write_text("nothing\n")
    assert main(["report", str(folder)]) == 1
    assert "must be JSON" in capsys.readouterr().err


def test_neither_curves_nor_tokens_load_torch(tmp_path):
    pytest.importorskip("pyarrow")
    folder = run_folder(tmp_path / "a")
    write_records(folder / "records", {"token_id": [1]})
    code = (
        "import sys\nsys.modules['transformers'] = None\nfrom trustrl.cli import main\n"
        "ended = main(sys.argv[1:])\nsys.exit(ended or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "report", str(folder), "--out", str(tmp_path / "report.html")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_an_ascii_terminal_gets_ascii_and_a_page_in_utf8(tmp_path):
    folder = run_folder(tmp_path / "a", name="π")
    code = "import sys\nfrom trustrl.cli import main\nsys.exit(main(sys.argv[1:]) or main([*sys.argv[1:], '--out', 'report.html']))"
    process = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder)], capture_output=True, check=False, cwd=tmp_path,
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert b"25.0% -> 75.0%" in process.stdout
    assert process.stdout.startswith(b"pi: finished")
    assert "<h1>π</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
