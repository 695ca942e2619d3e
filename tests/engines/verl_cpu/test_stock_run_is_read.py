"""A stock verl run of the installed version, read by `trustrl.runs`."""

import pytest

from support.stock_verl_run import GROUP, HELD_OUT, PROMPTS, STEPS, UPDATES, train
from trustrl.runs.open_run import open_run


@pytest.mark.long
def test_a_stock_run_is_read_from_each_of_its_logs(tmp_path):
    assert train(tmp_path) == 0
    run, console = open_run(tmp_path), open_run(tmp_path / "console.log")
    assert (run.status, run.steps, run.faults) == ("finished", STEPS, ())
    assert console.rows == run.rows
    events = open_run(tmp_path / "tensorboard")
    for ours, theirs in zip(run.rows, events.rows, strict=True):
        assert {name: pytest.approx(value, rel=1e-6) for name, value in ours.items()} == theirs
    assert (run.settings.updates_per_batch, run.settings.completions_per_prompt) == (UPDATES, GROUP)
    assert [one["count"] for one in run.evaluations] == [HELD_OUT] * 3
    assert len(list(run.completions())) == STEPS * PROMPTS * GROUP
