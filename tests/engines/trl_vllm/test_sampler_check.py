"""The gap between decode and prefill on a real vLLM: 0 in float32, and not in bf16."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from support.rendezvous import own_environment, python_path
from trustrl.engines.trl.sampler import SamplerCheck
from trustrl.errors import ConfigError

GAP = "trustrl/decode_prefill_gap"

pytestmark = pytest.mark.xdist_group("sampler check")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    script = Path(__file__).with_name("gap_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("model"))],
        capture_output=True, text=True, timeout=400,
        env=own_environment(PYTHONPATH=python_path(), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def test_scores_of_a_finished_sequence_are_not_the_recorded_numbers_in_bf16(found):
    """Every other test of the sampler runs in float32, where scoring again would pass for μ."""
    print(found)
    bf16, float32 = found["bfloat16"]["metrics"], found["float32"]["metrics"]
    assert len(bf16[GAP]) == len(float32[GAP]) == 3  # rollouts 0, 2 and 4
    assert max(float32[f"{GAP}_max"]) < 1e-4
    assert max(bf16[f"{GAP}_max"]) > 1e-3
    assert 0 < max(bf16[GAP]) < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_check_sees_a_record_that_is_off(found, dtype):
    assert found[dtype]["shifted by 0.25"][GAP][0] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("case", ["another temperature", "never"])
def test_nothing_is_reported_where_nothing_can_be_compared_or_nobody_asked(found, case):
    assert found["bfloat16"][case] == found["float32"][case] == {}


def test_a_number_of_rollouts_below_zero_is_refused():
    with pytest.raises(ConfigError, match="check_sampler_every must be a whole number ≥ 0"):
        SamplerCheck(-1)
