"""Files that TRL 1.16.0 and verl 0.9.1 wrote themselves, of two runs with a seeded fault in the sampler."""

import gzip
from pathlib import Path

import pytest

from trustrl.cli import main
from trustrl.tools.explain.explanation import explain

DATA = Path(__file__).parent / "data"
"""`stock-trl-temperature` and `stock-verl-stale` of studies/06-fault-found/seeded_runs.py."""


def unpacked(name, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.decompress((DATA / f"{name}.gz").read_bytes()))


def test_a_sampler_with_another_temperature_is_found_in_trls_trainer_state(tmp_path):
    unpacked("stock-trl-1.16.0-trainer_state.json", tmp_path / "checkpoint-40/trainer_state.json")
    found = explain(tmp_path)
    (cause,) = found.causes
    assert cause.name == "wrong temperature"
    assert cause.numbers[0].value == pytest.approx(0.222, abs=5e-4)
    assert cause.numbers[0].limit == 0.04  # the dtypes are unknown
    assert "settings" in [one.what for one in found.unchecked]


def test_the_guide_shows_what_explain_prints_of_that_run(tmp_path, capsys):
    unpacked("stock-trl-1.16.0-trainer_state.json", tmp_path / "checkpoint-40/trainer_state.json")
    assert main(["explain", str(tmp_path)]) == 1
    guide = Path(__file__).parents[3] / "docs/guides/explain.md"
    assert f"$ trustrl explain stock-trl-temperature\n{capsys.readouterr().out}```" in guide.read_text()


def test_weights_that_arrive_every_fourth_batch_are_found_in_verls_log(tmp_path):
    unpacked("stock-verl-0.9.1-metrics.jsonl", tmp_path / "metrics.jsonl")
    found = explain(tmp_path / "metrics.jsonl")
    (cause,) = found.causes
    assert cause.name == "stale weights"
    assert cause.numbers[0].source == "rollout_corr/k3_kl"
    assert {"updates per batch", "token records"} <= {one.what for one in found.unchecked}
