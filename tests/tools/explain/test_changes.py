"""The one setting to change: its name in the run's own trainer, and its value."""

import pytest

from support.explained_runs import falling, run_of
from trustrl.tools.explain import explain
from trustrl.tools.explain.changes import lower_learning_rate


def far(row):
    return {"trustrl/kl_k3": 0.5 * ((row["step"] - 1) % 4), **falling(row)}


@pytest.mark.parametrize(
    ("engine", "setting"),
    [("trl", "learning_rate"), ("verl", "actor_rollout_ref.actor.optim.lr"), (None, "learning rate")],
)
def test_the_setting_has_the_name_that_the_trainer_gives_it(engine, setting):
    (cause,) = explain(run_of(far, settings={"engine": engine})).causes
    assert cause.change.setting == setting
    assert cause.change.now == "0.0001"


@pytest.mark.parametrize(("rate", "factor", "value"), [(1e-3, 3, "3e-4"), (1e-4, 5, "2e-5"), (3e-6, 1, "1e-6")])
def test_a_learning_rate_is_lowered_to_one_digit_and_by_at_least_three(rate, factor, value):
    change = lower_learning_rate(run_of(settings={"learning_rate": rate}), factor)
    assert change.value == value
    assert float(change.value) <= rate / 3 * (1 + 1e-9)


def test_top_p_of_the_sampler_is_switched_off():
    (cause,) = explain(
        run_of(
            lambda row: {"trustrl/mismatch_abs_mean": 0.03, "trustrl/mismatch_ratio_mean": 0.971},
            settings={"engine": "verl", "top_p": 0.8},
        )
    ).causes
    assert cause.change.words() == "actor_rollout_ref.rollout.top_p = 1.0 (now 0.8)"


def test_a_fault_that_no_setting_repairs_names_none():
    (cause,) = explain(run_of(lambda row: {"trustrl/fault_advantage": 5.0} if row["step"] >= 7 else {})).causes
    assert cause.change is None
