"""TRL's own GRPOTrainer, unchanged, with real vLLM sampling and a weight sync at every step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("pyarrow")

from support.rendezvous import own_environment
from trustrl.engines.vllm.options import CPU_ENVIRONMENT
from trustrl.recording import read, read_run, read_sequences


def test_two_steps_of_trl_stay_on_policy(tmp_path):
    """In a process of its own: TRL sets the process group up, and `set_cpu_environment` must come before vllm."""
    environment = own_environment(without=CPU_ENVIRONMENT, PYTHONPATH=os.pathsep.join(sys.path))
    script = Path(__file__).with_name("grpo_run.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.partition("REPORT ")[2] for line in run.stdout.splitlines() if "REPORT " in line]
    reports = [json.loads(line) for line in lines]
    for report in reports:
        print(report)
    assert len(reports) == 2
    assert reports[0]["head"] != reports[1]["head"]  # the trainer has moved, so the second sync had work to do
    for report in reports:
        assert report["num_tokens"] > 50
        assert report["same_tokens"]
        assert report["gap"] < 1e-4
        assert report["top_gap"] < 1e-4
        assert report["untempered_gap"] > 0.1
        assert report["sync_gap"] < 1e-4
        assert report["sync_seconds"] < 10
    (log,) = [json.loads(line.partition("LOG ")[2]) for line in run.stdout.splitlines() if "LOG " in line]
    check_record(tmp_path / "records", log)


def check_record(folder, log):
    """The record of a stock run agrees with TRL's own log on the mismatch between sampler and trainer."""
    tokens = read(folder)
    assert read_run(folder)["engine"]["settings"]["sampler"] == "vllm"
    assert read_run(folder)["dtypes"] == {"trainer": "float32", "sampler": "float32"}
    assert {"kept", "weight", "behavior_logp", "proximal_logp", "policy_logp", "entropy"} <= set(tokens)
    for step, row in enumerate(log):
        here = tokens["step"] == step
        gap = (tokens["proximal_logp"] - tokens["behavior_logp"])[here].abs()
        assert 0 < gap.mean().item() == pytest.approx(row["sampling/sampling_logp_difference/mean"], rel=1e-4)
        assert gap.max().item() == pytest.approx(row["sampling/sampling_logp_difference/max"], rel=1e-4)
        assert tokens["entropy"][here].mean().item() == pytest.approx(row["entropy"], rel=1e-5)
        rewards = [one["reward"] for one in read_sequences(folder).to_pylist() if one["step"] == step]
        assert sum(rewards) / 8 == pytest.approx(row["reward"])
