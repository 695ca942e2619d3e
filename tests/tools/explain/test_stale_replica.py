"""A replica of the sampler that does not follow the trainer: named by records, or by the engine's own count."""

import pytest

pytest.importorskip("pyarrow")

from support.explained_runs import names, run_of
from support.run_folders import write_records
from trustrl.recording import sequence_tables
from trustrl.tools.explain.explanation import explain

STEPS, FROZEN = 12, 8


def recorded(folder, *, frozen=FROZEN, gap=0.1, name="10.0.0.8:8000", **columns):
    """Two replicas with 100 tokens each per step; from one step on, the second does not follow."""
    for step in range(1, STEPS + 1):
        count = 100
        far = gap if frozen and step > frozen else 0.02
        policy = [-1.02] * count + [-1.0 - far] * count
        tokens = {"sequence": [10 * step] * count + [10 * step + 1] * count, "policy_logp": policy}
        write_records(folder, tokens | {"sampler_version": [step] * 2 * count} | columns, step=step)
        rows = [{"sequence": 10 * step, "replica": "10.0.0.7:8000"}, {"sequence": 10 * step + 1, "replica": name}]
        sequence_tables.write_sequences(folder, rows, step=step, rank=0, text=False)
    return run_of(lambda row: {}, records=(str(folder),))


def test_records_name_the_replica_and_the_step(tmp_path):
    (found,) = explain(recorded(tmp_path)).causes
    assert found.name == "stale replica"
    assert "1 of 2 replicas" in found.reason
    assert "10.0.0.8:8000 (from step 9)" in found.reason
    assert found.numbers[0].value == pytest.approx(0.1)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"frozen": None}, id="both follow"),
        pytest.param({"name": None}, id="nobody knows the replica"),
        pytest.param({"sampler_version": [0] * 200}, id="tokens that say that they are old"),
        pytest.param({"update": [1] * 200}, id="later updates"),
    ],
)
def test_nothing_is_named_without_cause(tmp_path, more):
    assert names(recorded(tmp_path, **more)) == []


def test_without_records_the_engines_count_tells_that_there_is_one():
    run = run_of(lambda row: {"trustrl/stale_replicas": float(row["step"] > 5)})
    (found,) = explain(run).causes
    assert found.name == "stale replica"
    assert "log names it" in found.reason
    assert found.numbers[0].step == 6
    assert names(run_of(lambda row: {"trustrl/stale_replicas": 0.0})) == []
