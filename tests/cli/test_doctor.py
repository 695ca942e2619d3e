"""`trustrl doctor`: exit codes, JSON, and that it imports nothing heavy."""

import json
import os
import subprocess
import sys

import pytest

from trustrl.cli import main
from trustrl.tools.doctor import Finding, examination


@pytest.fixture
def finds(monkeypatch):
    """A machine on which exactly these findings are made."""

    def make(*findings):
        for name in ("package_versions", "ports", "environment", "storage"):
            monkeypatch.setattr(getattr(examination, name), "check", list)
        monkeypatch.setattr(examination.ports, "check", lambda: list(findings))

    return make


NOTE = Finding("note", "a small thing", "because", "nothing")
ERROR = Finding("error", "an open door", "anyone may come in", "close it")


def test_a_sound_machine_ends_with_0(finds, capsys):
    finds(NOTE)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert "note: a small thing" in said.out
    assert "0 errors, 0 warnings, 1 note" in said.out
    assert "torch" in said.out
    assert said.err == ""


def test_an_error_ends_with_1_and_comes_first(finds, capsys):
    finds(NOTE, ERROR)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.index("error: an open door\n  anyone may come in\n  → close it") < said.index("note: a small thing")


def test_json_has_versions_findings_and_the_cache(finds, capsys):
    finds(ERROR)
    assert main(["doctor", "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["findings"] == [
        {"level": "error", "what": "an open door", "why": "anyone may come in", "do": "close it"}
    ]
    assert {"package", "installed", "declared", "tested"} == made["versions"][0].keys()
    assert made["cache"]["free_bytes"] > 0


def test_doctor_runs_without_packaging():
    code = (
        "import sys\nfor name in ('', '.requirements', '.version'): sys.modules['packaging' + name] = None\n"
        "import importlib.util\nreal = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'packaging' else real(name, *more)\n"
        "from trustrl.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "note: package versions were not compared" in done.stdout
    assert "torch" in done.stdout


def test_nothing_heavy_is_imported_and_no_secret_is_printed():
    code = (
        "import sys\nfrom trustrl.cli import main\nmain(['doctor'])\n"
        "sys.exit(bool({'torch', 'numpy', 'transformers', 'trl', 'ray', 'pyarrow'} & set(sys.modules)))"
    )
    given = os.environ | {"HF_TOKEN": "hf_never_show_this"}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN in the environment" in done.stdout
    assert "never_show" not in done.stdout + done.stderr
