"""`swift rlhf` from its command line, with real steps on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("swift")

from support import swift_world as world

TIGHT = json.dumps({"preset": "dppo-binary-tv", "max_increase": 0.001, "max_decrease": 0.001})
REGIONS = {
    "dppo-binary-tv": (TIGHT, "trustrl/masked_share"),
    "dppo-topk-tv": ("dppo-topk-tv", "trustrl/divergence_mean"),
    "troll": (json.dumps({"preset": "troll", "bound": 1e-4}), "trustrl/projected_share"),
}


@pytest.mark.parametrize("name", REGIONS)
def test_swift_rlhf_trains_with_a_region_from_its_command_line(given, tmp_path, name):
    region, acts = REGIONS[name]
    settings = {**given, "output_dir": str(tmp_path / "out")}
    done = subprocess.run(
        [Path(sys.executable).with_name("swift"), "rlhf", *world.command_line(settings)],
        env={**os.environ, "TRUSTRL_REGION": region, "TRUSTRL_BEHAVIOR": "trainer"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = world.logged(tmp_path / "out")
    assert len(steps) == 6
    first, *later = [step[acts] for step in steps]
    assert first == 0  # the policy has the rollout's weights
    assert max(later) > 0
    assert steps[0]["trustrl/dropped_share"] == 0
    assert "trustrl/mismatch_abs_mean" not in steps[0]  # nobody but the trainer recorded log-probs


def test_swift_rlhf_stops_at_a_refused_setting(given, tmp_path):
    settings = {**given, "output_dir": str(tmp_path / "out"), "loss_type": "cispo"}
    done = subprocess.run(
        [Path(sys.executable).with_name("swift"), "rlhf", *world.command_line(settings)],
        env={**os.environ, "TRUSTRL_REGION": "ppo", "TRUSTRL_BEHAVIOR": "trainer"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    assert "loss_type must be one of grpo, bnpo, dr_grpo, dapo with a region, got 'cispo'" in done.stderr
