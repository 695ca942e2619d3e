"""Records of earlier versions: `data/version-1` was written by trustrl 0.1.0, `data/version-2` by the code after it.

Each has two steps with two updates of four sequences, the region dppo-topk-tv with its top-K, and a dump.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq
import torch

import trustrl
from support import recording_batches as batches
from support.run_folders import run_folder
from trustrl.cli import main
from trustrl.recording import Recorder, Recording, read, read_run, read_sequences, stream

DATA = Path(__file__).parent / "data"
REGION = trustrl.preset("dppo-topk-tv")


@pytest.fixture(autouse=True)
def files_without_checksums_are_named():
    """They are read, with a warning; the validator lists it instead."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", trustrl.errors.TrustRLWarning)
        yield
    assert said
    assert all("have no checksums" in str(one.message) for one in said)


@pytest.fixture(params=[1, 2])
def version(request):
    return request.param


@pytest.fixture
def folder(version):
    return DATA / f"version-{version}"


def test_every_column_reads_as_it_was_written(folder, version):
    found = read(folder)
    plain = pq.read_table(sorted(folder.glob("*.parquet")))
    assert plain.schema.metadata[b"trustrl.schema_version"] == str(version).encode()
    assert len(plain) == 64
    filled = [name for name in plain.column_names if plain[name].null_count == 0]
    assert sorted(found) == sorted(filled)
    assert {"behavior_logp", "proximal_logp", "topk_ids", "kept", "weight", "divergence_upper"} <= set(filled)
    for name in filled:
        assert torch.equal(found[name], torch.tensor(plain[name].to_pylist(), dtype=found[name].dtype)), name
    assert trustrl.config_from_dict(found.region) == REGION
    assert 0 < found["kept"].sum() < 64
    assert sum(map(len, stream(sorted(folder.glob("*.parquet"))))) == 64
    assert len(read_sequences(folder)) == 0
    assert read_run(folder) is None


def test_an_audit_reproduces_its_verdicts(folder, capsys):
    assert main(["audit", str(folder), "--regions", "ppo,dppo-topk-tv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["sequences"], found["files"]) == (64, 16, 2)
    assert found["reproduced"] == {"rows": 64, "kept_differs": 0, "weight_rows": 0, "weight_differs": 0}
    stopped = int((~read(folder)["kept"]).sum())
    assert found["regions"]["recorded"]["stopped"] == stopped > 0
    bounds = found["regions"]["dppo-topk-tv"]
    assert bounds["stopped"] <= stopped <= bounds["stopped_at_most"]


def test_a_report_shows_its_tokens(folder, tmp_path, capsys):
    run = run_folder(tmp_path / "run", region="dppo-topk-tv")
    shutil.copytree(folder, run / "records")
    assert main(["report", str(run), "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["runs"][0]["tokens"]
    assert tokens["recorded"] == tokens["read"] == 64
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "64 recorded tokens" in (tmp_path / "page.html").read_text()


def test_calibration_and_the_validator_take_it(folder, capsys):
    assert main(["calibrate", str(folder), "--json"]) == 1  # too few tokens for a threshold
    assert json.loads(capsys.readouterr().out)["noise"] == 32
    assert main(["records", "check", str(folder)]) == 0
    assert capsys.readouterr().err.endswith("valid; 3 files, 96 tokens, 0 sequences, 0 texts\n")


def test_a_run_that_went_on_with_todays_version_reads_as_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "records")
    made = Recorder(Recording(folder=tmp_path / "records", sample=1.0, topk=True), REGION, rank=0)
    batches.give(made, batches.batch(region=REGION, k=20, proximal=True), step=2)
    found = read(tmp_path / "records")
    assert found["step"].unique().tolist() == [0, 1, 2]
    assert found["topk_tail"][:64].isnan().all()
    assert found["topk_tail"][64:].isfinite().all()
    assert main(["audit", str(tmp_path / "records")]) == 0
