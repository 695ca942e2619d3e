"""SGLang keeps the sampler contract: every row on one running engine, in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from support.contract.rows import ROWS
from support.rendezvous import own_environment, python_path
from trustrl.engines.common.seam import version_of

KEPT = os.environ.get("TRUSTRL_CONTRACT_RESULTS")
"""A folder to keep the results in, from which `scripts/sampler_contract.py` writes the page."""

OLD = version_of("sglang") < (0, 5, 16)
REFUSED = {name for name in ROWS if "top-p" in name or "top-k" in name or "min-p" in name or "kept ids" in name} | {
    "weights updated inside a response",
    "fault: raw log-probs at temperature 0.5",
}
"""Rows that a release without kept ids and without spans of versions cannot give."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    out = Path(KEPT or folder).resolve() / f"sglang-{version('sglang')}.json"
    done = subprocess.run(
        [sys.executable, "-m", "support.contract.run", "sglang", str(folder), str(out)],
        capture_output=True, text=True, timeout=1800, env=own_environment(PYTHONPATH=python_path()), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["row"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize("name", [name for name, (engine, _) in ROWS.items() if engine == "main"])
def test_sglang_keeps_the_contract(results, name):
    result = results[name]["result"]
    assert result == ("cannot" if OLD and name in REFUSED else "passed"), results[name]
