"""A real verl training worker with our loss: model, FSDP2, micro-batches, ranks, and verl's own metrics."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
import verl_world as world

from trustrl.engines.seam import version_of

HERE = Path(__file__).parent


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_worker_gets_the_same_gradient_from_ours(ranks, tmp_path):
    """Three micro-batches a rank, one of them without a token in the loss: names and numbers must still add up."""
    environment = os.environ | {
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "trustrl.engines.verl_cpu.plugin,trustrl.engines.verl", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    run = subprocess.run(
        [*launch, str(HERE / "verl_worker.py"), str(tmp_path / "found")],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = torch.load(tmp_path / "found", weights_only=False)
    assert set(found) == set(world.MODES)
    for mode, (ours, theirs) in found.items():
        assert world.error(ours["gradient"], theirs["gradient"]) <= 1e-6, mode
        clipped = [float(torch.tensor(side["metrics"]["actor/pg_clipfrac"]).mean()) for side in (ours, theirs)]
        assert clipped[0] == pytest.approx(clipped[1], abs=1e-6), mode
        assert 0.05 < clipped[0] < 0.6, mode
        assert "trustrl/dropped_share" in ours["metrics"]
