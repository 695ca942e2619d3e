"""verl's own `main_ppo` on Ray with its own loss: two environment variables write the record.

The record goes into the bucket of an S3 server on this machine if moto is installed, and into a folder otherwise.
"""

import importlib.util
import os
import re
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.s3_server import s3_server
from support.verl_cpu_runs import STEPS, stock
from trustrl.engines.common.seam import version_of
from trustrl.engines.common.stock_tokens import FOLDER
from trustrl.recording import read, read_run, read_sequences, read_texts
from trustrl.recording.record_files import part_files
from trustrl.regions.presets import preset
from trustrl.tools.audit import TokenCounts, arm, count_records
from trustrl.tools.audit.region_replay import COLUMNS

pytestmark = [
    pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention"),
    pytest.mark.xdist_group("stock record"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(address of the record, lines of metrics) of a run on two ranks."""
    folder = tmp_path_factory.mktemp("stock")
    with ExitStack() as stack:
        record = str(folder / "records")
        if "TRUSTRL_MOTO" in os.environ or importlib.util.find_spec("moto") is not None:
            record = stack.enter_context(s3_server(folder / "s3.log")).bucket("stock")
        code, said = stock(folder, "trainer.n_gpus_per_node=2", modules="trustrl.engines.verl", **{FOLDER: record})
        assert code == 0, said[-6000:]
        yield record, [line for line in said.splitlines() if "critic/score/mean:" in line]


def logged(line, name):
    return float(re.search(rf"{re.escape(name)}:(?:np\.\w+\()?(-?[\d.e+-]+)", line).group(1))


def test_the_record_agrees_with_verls_own_log(run):
    folder, lines = run
    tokens, rows = read(folder), read_sequences(folder).to_pylist()
    assert len(lines) == STEPS
    assert tokens["rank"].unique().tolist() == [0, 1]
    assert {"behavior_logp", "proximal_logp", "policy_logp", "entropy", "sampler_version"} <= set(tokens)
    assert "kept" not in tokens
    for step, line in enumerate(lines, start=1):
        now, here = tokens["step"] == step, [row for row in rows if row["step"] == step]
        assert len(here) == 32
        assert sum(row["reward"] for row in here) / 32 == pytest.approx(logged(line, "critic/score/mean"), rel=1e-5)
        lengths = [row["completion_tokens"] for row in here]
        assert sum(lengths) / 32 == pytest.approx(logged(line, "response_length/mean"), rel=1e-6)
        assert sum(x.item() for x in now) == sum(lengths), "one epoch"
        assert len({row["group"] for row in here}) == 8
        assert tokens["sampler_version"][now].unique().tolist() == [step]
        first = now & (tokens["update"] == 0)
        # The sampler and the trainer run the same network in float32.
        assert (tokens["behavior_logp"] - tokens["policy_logp"])[first].abs().max() < 1e-4
        assert (tokens["proximal_logp"] - tokens["behavior_logp"])[now].abs().max() < 1e-4


def test_texts_and_run_are_described(run):
    folder, _ = run
    texts = read_texts(folder).to_pylist()
    assert len(texts) == 32 * STEPS
    assert all(re.fullmatch(r"\d+\+\d+=", row["prompt"]) for row in texts), texts[0]
    about = read_run(folder)
    assert about["engine"]["name"] == "verl"
    assert about["engine"]["settings"]["loss"] == "vanilla"
    assert about["engine"]["settings"]["completions_per_prompt"] == 4
    assert about["sampling"]["temperature"] == 1.0
    assert about["dtypes"] == {"trainer": "float32", "sampler": "float32"}
    assert about["region"] is None


def test_ray_data_counts_the_record_as_one_process_does(run, monkeypatch):
    files, of = part_files(run[0]), partial(TokenCounts.of, arms=[arm(name, preset(name)) for name in ("ppo", "dppo")])
    assert len(files) == 2 * STEPS
    import ray

    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of another test on this machine, which may end first
    here = count_records(files, of, kind=TokenCounts, columns=COLUMNS, workers=2, where="processes")
    try:
        on_ray = count_records(files, of, kind=TokenCounts, columns=COLUMNS, workers=2, where="ray")
    finally:
        ray.shutdown()  # a later test in this process starts its own cluster
    assert here == on_ray
    assert here.counts["rows"] == len(read(run[0])["step"])
