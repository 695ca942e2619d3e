"""A sampler that two ranks share: one engine split over both, and a server that only the first can reach."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.rendezvous import own_environment
from trustrl.engines.vllm.options import CPU_ENVIRONMENT


def test_every_rank_gets_the_scores_of_its_own_sequences(tmp_path):
    paths = os.pathsep.join(sys.path)
    environment = own_environment(without=CPU_ENVIRONMENT, PYTHONPATH=paths, ACCELERATE_USE_CPU="true")
    script = Path(__file__).with_name("parallel_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path]
    run = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    # Two ranks share the pipe: one may write before the other has ended its line.
    texts = run.stdout.split("REPORT ")[1:]
    reports = {report["rank"]: report for report, _ in map(json.JSONDecoder().raw_decode, texts)}
    assert sorted(reports) == [0, 1]
    for rank, shape in ((0, [2, 39]), (1, [1, 5])):
        print(reports[rank])
        assert reports[rank]["sync_gap"] < 1e-4
        for way in ("parallel", "served"):
            assert reports[rank][way]["shape"] == shape
            assert reports[rank][way]["gap"] < 1e-4
