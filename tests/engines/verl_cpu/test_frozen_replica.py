"""Two vLLM replicas of a verl run on Ray, one of which misses its weight syncs: the log, the record and `explain`."""

import os
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.verl_cpu_runs import trained
from trustrl.engines.common.seam import version_of
from trustrl.recording import read_sequences
from trustrl.runner.directory import RunDirectory
from trustrl.tools.explain.explanation import explain
from trustrl_verl_cpu.vllm_server import VARIABLE

STEPS, FROZEN = 10, 5
SERVERS = ("trustrl_cpu_server_0", "trustrl_cpu_server_1")
SETTINGS = [
    "region.preset=dppo-binary-tv", "sampler.kind=vllm", "engine.ranks_per_node=2", f"schedule.steps={STEPS}",
    f"schedule.checkpoint_every={STEPS}", "schedule.prompts_per_step=16",
    "engine.settings.actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "engine.settings.algorithm.rollout_correction.bypass_mode=true",
]  # fmt: skip

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention"),
    pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set"),
]


@pytest.mark.parametrize("frozen", [FROZEN, 0], ids=["one frozen", "both follow"])
def test_a_frozen_replica_is_named_in_the_next_step_by_log_record_and_explain(tmp_path, frozen):
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    code, said = trained(
        tmp_path, SETTINGS, PYTHONPATH=here, VERL_USE_EXTERNAL_MODULES="verl_frozen_server",
        TRUSTRL_TEST_FROZEN=str(frozen),
    )  # fmt: skip
    assert code == 0, said[-6000:]
    run = tmp_path / "run"
    flagged = [row["step"] for row in RunDirectory(run).rows() if row["trustrl/stale_replicas"] > 0]
    assert flagged == (list(range(FROZEN + 1, STEPS + 1)) if frozen else [])
    log = (run / "verl.log").read_text()
    assert log.count("stands out") == bool(frozen)
    assert (f"Replica {SERVERS[1]} stands out at step {FROZEN + 1}:" in log) == bool(frozen)
    rows = read_sequences(run / "records").to_pylist()
    assert {row["replica"] for row in rows if row["step"] == FROZEN + 1} == {*SERVERS}
    causes = [cause for cause in explain(run).causes if cause.name == "stale replica"]
    assert len(causes) == bool(frozen)
    assert all(f"{SERVERS[1]} (from step {FROZEN + 1})" in cause.reason for cause in causes)
