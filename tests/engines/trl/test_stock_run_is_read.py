"""A stock TRL run of the installed version, read by `trustrl.runs`."""

import pytest

from support.stock_trl_run import GROUP, STEPS, UPDATES, train
from trustrl.runs.open_run import open_run


def test_a_stock_run_is_read_as_the_trainer_logged_it(tmp_path):
    trainer = train(tmp_path)
    run = open_run(tmp_path)
    logged = [one for one in trainer.state.log_history if "loss" in one]
    assert (run.status, run.steps, run.faults) == ("finished", STEPS, ())
    for ours, theirs in {"loss": "loss", "grad_norm": "grad_norm", "clip_share": "clip_ratio/region_mean"}.items():
        assert [row[ours] for row in run.rows] == [one[theirs] for one in logged]
    assert (run.settings.updates_per_batch, run.settings.completions_per_prompt) == (UPDATES, GROUP)
    found = list(run.completions())
    for row in run.rows:
        if batch := [one.reward for one in found if one.step == row["step"]]:
            assert sum(batch) / len(batch) == pytest.approx(row["reward"], abs=1e-5)
    assert {one.step for one in found} == {1, 5}  # the evaluation after step 3 replaced that step's
