"""Runs of stock trainers: TRL's rows by update or by ten steps, verl's rows by batch, and missing settings."""

import pytest

from support.explained_runs import MISMATCH, RATIO, names, run_of, verl_run
from trustrl.tools.explain.evidence import Evidence
from trustrl.tools.explain.explanation import explain

GONE = dict.fromkeys(
    ("trustrl/kl_k3", "trustrl/masked_share", "trustrl/entropy", "trustrl/dropped_share", "trustrl/fault_advantage",
     "trustrl/fault_policy", "frac_reward_nan", MISMATCH, RATIO), "gone",
)  # fmt: skip
UNKNOWN = {"updates_per_batch": None, "trainer_dtype": None, "sampler_dtype": None, "learning_rate": None}


def stock_trl(change=lambda row: {}, *, updates=4, **more):
    """A run as TRL's own trainer logs it: rewards only when it samples, clipping instead of KL, no settings."""

    def stock(row):
        first = (row["step"] - 1) % updates == 0
        sampled = (
            {} if first else {"reward": "gone", "frac_reward_zero_std": "gone", "completions/clipped_ratio": "gone"}
        )
        return {**GONE, "entropy": row["trustrl/entropy"], "clip_share": 0.001, **sampled, **change(row)}

    return run_of(stock, updates=updates, settings={**UNKNOWN, "engine": "trl"}, **more)


def harmed(row):
    """The reward of a batch: it falls after the fifth."""
    return {"reward": 0.6 if row["step"] <= 20 else 0.05} if row["step"] % 4 == 1 else {}


def test_a_healthy_run_of_stock_trl_has_no_finding():
    assert names(stock_trl()) == []


def test_the_number_of_updates_is_read_from_the_rows_with_a_reward_and_said():
    found = explain(stock_trl())
    assert Evidence(found.run).updates_per_batch == 4
    (said,) = [one for one in found.unchecked if one.what == "updates per batch"]
    assert "Taken as 4" in said.would_tell


def test_irregular_rewards_leave_the_number_of_updates_unknown():
    run = stock_trl(lambda row: {"reward": "gone"} if row["step"] == 5 else {})
    assert Evidence(run).updates_per_batch is None
    assert names(run) == []


def test_clipping_after_one_update_shows_the_learning_rate_in_stock_trl():
    def clipped(row):
        return {"clip_share": 0.0 if row["step"] % 4 == 1 else 0.4, **harmed(row)}

    (found,) = explain(stock_trl(clipped)).causes
    assert found.name == "learning rate too large"
    assert found.numbers[0].metric == "clip_share"


def test_clipping_that_builds_up_is_too_many_updates_in_stock_trl():
    def clipped(row):
        return {"clip_share": 0.06 * ((row["step"] - 1) % 4), **harmed(row)}

    assert names(stock_trl(clipped)) == ["too many updates per batch"]
    assert names(stock_trl(lambda row: {"clip_share": 0.06 * ((row["step"] - 1) % 4)})) == []


def test_rows_of_ten_steps_are_not_taken_for_single_updates():
    run = stock_trl(lambda row: {"clip_share": 0.4, **harmed(row)})
    every = [row | {"reward": 0.6 if row["step"] <= 20 else 0.05} for row in run.rows if row["step"] % 4 == 0]
    found = explain(type(run)(path="a", name="a", source="hand", rows=every, settings=run.settings))
    assert found.causes == []
    assert "a row for each update" in [one.what for one in found.unchecked]


def test_a_healthy_run_of_stock_verl_has_no_finding():
    assert names(verl_run()) == []


def test_the_gap_and_the_ratio_follow_from_verls_estimators_of_the_kl():
    one_sided = {"rollout_corr/kl": 0.05, "rollout_corr/k3_kl": 0.0013}
    scattered = {"rollout_corr/kl": 0.02, "rollout_corr/k3_kl": 0.02}
    assert names(verl_run(lambda row: one_sided)) == ["truncated support"]
    assert names(verl_run(lambda row: scattered)) == ["wrong temperature"]
    assert names(verl_run(lambda row: scattered if row["step"] > 2 else {})) == ["stale weights"]


def verl_harmed(row):
    return {"reward": 0.5 if row["step"] < 4 else 0.01}


@pytest.mark.parametrize(
    ("updates", "mean", "found"),
    [
        pytest.param(4, 1.08, "learning rate too large", id="four updates far apart"),
        pytest.param(2, 0.5, "learning rate too large", id="two updates far apart"),
        pytest.param(16, 0.1, "too many updates per batch", id="sixteen small ones"),
    ],
)
def test_the_mean_kl_of_a_batch_separates_large_updates_from_many(updates, mean, found):
    (cause,) = explain(verl_run(lambda row: {"trustrl/kl_k1": mean, **verl_harmed(row)}, updates=updates)).causes
    assert cause.name == found
    assert ("one update adds about 1 nats" if updates == 2 else "one update adds between") in cause.reason
    assert cause.numbers[0].source == "trustrl/kl_k1"


def test_without_the_number_of_updates_the_kl_of_a_batch_is_not_judged():
    found = explain(verl_run(lambda row: {"trustrl/kl_k1": 1.0, **verl_harmed(row)}, updates=None))
    assert found.causes == []
    assert "updates per batch" in [one.what for one in found.unchecked]


def test_the_gap_of_the_sampler_is_not_laid_on_the_updates_of_a_batch():
    def stale(row):
        gap = 0.0 if row["step"] == 1 else 0.1
        return {"rollout_corr/k3_kl": gap, "rollout_corr/kl": gap, "trustrl/kl_k1": 1.0, **verl_harmed(row)}

    assert names(verl_run(stale)) == ["stale weights"]


def test_advantages_of_zero_are_no_learning_signal_on_verl():
    dead = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "reward": 0.0}
    assert names(verl_run(lambda row: dead)) == ["no learning signal"]


@pytest.mark.parametrize(("longest", "found"), [(4.0, []), (512.0, ["completions cut off"])])
def test_responses_as_long_as_the_limit_are_cut_only_if_they_are_long(longest, found):
    run = verl_run(lambda row: {"response_length/max": longest, "reward": 0.0})
    assert names(run) == found
    missing = "completions/clipped_ratio" in [one.what for one in explain(run).unchecked]
    assert missing is not bool(found)


def test_a_run_with_a_reward_alone_says_what_it_lacks():
    run = verl_run(updates=None, trainer_dtype=None, sampler_dtype=None)
    rows = [{"step": row["step"], "reward": row["reward"]} for row in run.rows]
    found = explain(type(run)(path="a", name="a", source="hand", rows=rows, row_is="batch", settings=run.settings))
    assert found.causes == []
    assert {"sampler-trainer mismatch", "entropy", "groups with identical rewards", "updates per batch"} <= {
        one.what for one in found.unchecked
    }


def test_a_gap_that_only_the_dtype_could_judge_is_listed():
    found = explain(run_of(lambda row: {MISMATCH: 0.02}, dtype=None))
    assert "dtypes of sampler and trainer" in [one.what for one in found.unchecked]
    assert "dtypes of sampler and trainer" not in [one.what for one in explain(run_of()).unchecked]
