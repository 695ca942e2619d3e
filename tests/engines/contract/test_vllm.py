"""vLLM keeps the sampler contract: every row on a running engine, one process per engine."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.contract.rows import ROWS
from support.rendezvous import own_environment, python_path

KEPT = os.environ.get("TRUSTRL_CONTRACT_RESULTS")
"""A folder to keep the results in, from which `scripts/sampler_contract.py` writes the page."""

CANNOT = {
    "speculative decoding": "speculative_config must be None on a CPU",
    "fp8 weights": "vLLM's CPU build does not start with fp8 weights",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @cache
    def of(engine):
        folder = tmp_path_factory.mktemp("contract")
        out = Path(KEPT or folder).resolve() / f"vllm-{engine}.json"
        done = subprocess.run(
            [sys.executable, "-m", "support.contract.run", "vllm", str(folder), str(out), "--engine", engine],
            capture_output=True, text=True, timeout=900, env=own_environment(PYTHONPATH=python_path()), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return {row["row"]: row for row in json.loads(out.read_text())["rows"]}

    return of


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, id=name, marks=[] if engine == "main" else [pytest.mark.long])
        for name, (engine, _) in ROWS.items()
    ],
)
def test_vllm_keeps_the_contract(results, engine, name):
    row = results(engine)[name]
    if name in CANNOT:
        assert (row["result"], CANNOT[name] in row["note"]) == ("cannot", True), row
    else:
        assert row["result"] == "passed", row
