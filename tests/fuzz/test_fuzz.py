"""Short form of the fuzz harness, and some damaged inputs through the command line itself. `nox -s fuzz` runs the long form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")

from fuzz.corpus import KINDS, build
from fuzz.damage import Damage
from fuzz.harness import FAULTS, PATIENCE, Outcome, cases, judged, table

CASES = 120


def test_damaged_inputs_are_answered_or_refused(tmp_path):
    found = list(cases(range(CASES), 0, tmp_path))
    faults = [
        (outcome, command, case.damage.what, case.file, look)
        for case in found
        for command, (outcome, look) in case.outcomes.items()
        if outcome in FAULTS
    ]
    assert faults == []
    counts = [outcome for case in found for outcome, _ in case.outcomes.values()]
    assert min(counts.count(name) for name in ("refused", "same answer", "said", "answer")) > 5


WHOLE = Outcome(0, '{"rows": 7}', "")
FLIP = Damage("flip", is_flip=True)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome(0, '{"rows": 8}', ""), "difference"),
        (Outcome(0, '{"rows": 7}', ""), "same answer"),
        (Outcome(1, "", "error: `a.parquet` must be whole.\n"), "refused"),
        (Outcome(1, '{"rows": 8}', "a.parquet: damaged"), "said"),
        (Outcome(-1, "", "", trace="Traceback"), "traceback"),
        (Outcome(0, '{"rows": NaN}', ""), "not JSON"),
        (Outcome(1, "", ""), "no sentence"),
        (Outcome(0, "a \x1b[31m", ""), "unescaped"),
        (Outcome(0, "a\nerror: forged", ""), "unescaped"),
        (Outcome(0, "", "", page="<img src=x onerror=alert(1)>"), "script in page"),
        ("hang", "hang"),
    ],
)
def test_the_harness_tells_faults_from_answers(outcome, verdict):
    assert judged(outcome, WHOLE, (KINDS[0], FLIP, "records/a.parquet"))[0] == verdict


def _spoiled(run, how):
    file = run / ("metrics.jsonl" if how in ("fifo", "deep", "link") else "records/step-00000000.rank-0000.parquet")
    data = file.read_bytes()
    if how == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif how == "link":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif how == "deep":
        file.write_bytes(b"[" * 100_000 + b"\n")
    elif how == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        columns = pq.read_metadata(file).row_group(0).to_dict()["columns"]
        (column,) = (one for one in columns if one["path_in_schema"] == "policy_logp")  # both commands read it
        at = column["data_page_offset"] + column["total_compressed_size"] // 2
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("how", ["fifo", "link", "deep", "flip", "cut"])
def test_the_command_line_refuses_in_a_sentence(how, tmp_path):
    build("records", tmp_path / "run")
    _spoiled(tmp_path / "run", how)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    verbs = ("audit", "explain") if how in ("flip", "cut") else ("report", "explain")
    for verb in verbs:
        found = subprocess.run(
            [sys.executable, "-m", "trustrl.cli", verb, str(tmp_path / "run")],
            capture_output=True, text=True, timeout=PATIENCE, env=environment, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert found.returncode == 1
        assert found.stderr.startswith("error: ")
        assert found.stderr.count("\n") == 1
        assert ("metrics.jsonl" if how in ("fifo", "link", "deep") else "step-00000000") in found.stderr


def test_the_page_has_the_figures_of_the_last_long_run():
    root = Path(__file__).parents[2]
    figures = json.loads((root / "docs/data/fuzz.json").read_text())
    page = (root / "docs/reference/run-formats.md").read_text(encoding="utf-8")
    shown = page.split("<!-- fuzz: begin (nox -s fuzz) -->\n")[1].split("<!-- fuzz: end -->")[0]
    assert shown.strip() == table(figures["counts"])
    assert figures["inputs"] >= 2000
    assert not any(row.get(fault) for rows in figures["counts"].values() for row in rows.values() for fault in FAULTS)
