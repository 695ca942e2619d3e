"""Runs with one seeded symptom each, and the causes that must be named."""

import math

import pytest

from support.explained_runs import MISMATCH, RATIO, batch, falling, names, run_of
from trustrl.errors import RecordError
from trustrl.runs.run import Run, RunSettings
from trustrl.tools.explain.explanation import explain


@pytest.mark.parametrize("updates", [1, 4])
def test_nothing_is_found_in_a_healthy_run(updates):
    assert names(run_of(updates=updates)) == []


def test_a_run_without_a_step_is_not_called_healthy():
    with pytest.raises(RecordError, match="has no metrics"):
        explain(Run(path="a", name="a", source="hand", rows=[], settings=RunSettings()))


def test_a_mismatch_that_was_never_finite_breaks_no_rule():
    assert names(run_of(lambda row: {MISMATCH: None, RATIO: 0.5})) == []


def test_a_gap_that_grows_from_nothing_is_stale_weights():
    assert names(run_of(lambda row: {MISMATCH: 0.01 * batch(row)})) == ["stale weights"]


def test_a_gap_that_grows_is_not_called_stale_before_three_later_batches():
    assert names(run_of(lambda row: {MISMATCH: 0.01 * batch(row)}, batches=4)) == []


def test_the_gap_of_a_sampler_in_half_precision_is_healthy():
    assert names(run_of(lambda row: {MISMATCH: 0.02}, dtype="bfloat16")) == []


def test_a_small_gap_is_not_judged_if_the_dtype_is_unknown():
    assert names(run_of(lambda row: {MISMATCH: 0.02}, dtype=None)) == []
    assert names(run_of(lambda row: {MISMATCH: 0.2}, dtype=None)) == ["wrong temperature"]


def test_a_ratio_below_one_by_as_much_as_the_gap_is_truncated_support():
    assert names(run_of(lambda row: {MISMATCH: 0.03, RATIO: 0.971})) == ["truncated support"]


def test_a_ratio_far_below_one_with_a_gap_of_nats_is_no_truncation():
    assert names(run_of(lambda row: {MISMATCH: 1.5, RATIO: 0.1})) == ["tied head not synced"]


def test_ratios_above_one_are_no_truncation():
    masked = {MISMATCH: 0.2, RATIO: 0.85, "sampling/importance_sampling_ratio/max": 2.9}
    assert names(run_of(lambda row: masked)) == ["wrong temperature"]


def test_a_gap_that_outgrows_its_own_start_is_stale_in_half_precision_too():
    assert names(run_of(lambda row: {MISMATCH: 0.001 + 0.004 * batch(row)}, dtype="bfloat16")) == ["stale weights"]


def test_truncation_shows_below_the_noise_of_half_precision():
    assert names(run_of(lambda row: {MISMATCH: 0.01, RATIO: 0.992}, dtype="bfloat16")) == ["truncated support"]


def test_without_records_a_gap_within_the_entropy_is_a_temperature_and_half_as_sure():
    (found,) = explain(run_of(lambda row: {MISMATCH: 0.2})).causes
    assert found.name == "wrong temperature"
    assert found.confidence <= 0.5


def test_without_records_a_gap_beyond_the_entropy_is_other_weights():
    assert names(run_of(lambda row: {MISMATCH: 2.0})) == ["tied head not synced"]


def test_without_records_a_gap_that_grows_from_the_start_is_other_weights():
    assert names(run_of(lambda row: {MISMATCH: 0.1 * (1 + batch(row) / 2)})) == ["tied head not synced"]


def test_without_an_entropy_a_temperature_is_not_claimed():
    (found,) = explain(run_of(lambda row: {MISMATCH: 0.2, "trustrl/entropy": "gone"})).causes
    assert found.name == "tied head not synced"
    assert "cannot be told" in found.reason


def test_a_fault_in_the_advantages_is_named_with_its_first_step():
    run = run_of(lambda row: {"trustrl/fault_advantage": 5.0, "trustrl/dropped_share": 0.1} if row["step"] >= 7 else {})
    (found,) = explain(run).causes
    assert (found.name, found.confidence) == ("non-finite values", 1.0)
    assert {(one.metric, one.step, one.value) for one in found.numbers} == {
        ("trustrl/fault_advantage", 7, 5.0),
        ("trustrl/dropped_share", 7, 0.1),
    }


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_reward_that_is_no_number_came_in_with_the_batch(value):
    (found,) = explain(run_of(lambda row: {"reward": value} if row["step"] == 3 else {})).causes
    assert found.name == "non-finite values"
    assert "The inputs contain them" in found.reason


def test_a_reward_that_trl_left_out_came_in_with_the_batch():
    (found,) = explain(run_of(lambda row: {"frac_reward_nan": 0.01 if row["step"] == 21 else 0.0})).causes
    assert (found.name, found.order.name, found.confidence) == ("non-finite values", "INPUT", 1.0)
    assert [(one.metric, one.step, one.value) for one in found.numbers] == [("frac_reward_nan", 21, 0.01)]


def test_one_update_that_goes_far_and_a_fallen_reward_are_the_learning_rate():
    run = run_of(lambda row: {"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4), **falling(row)})
    assert names(run) == ["learning rate too large"]


def test_an_unknown_learning_rate_is_not_printed():
    run = run_of(
        lambda row: {"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4), **falling(row)}, settings={"learning_rate": None}
    )
    assert explain(run).causes[0].action == "Lower the learning rate by a factor of 3 to 10."


def test_batches_without_a_gradient_do_not_hide_the_learning_rate():
    def dead_after_the_second_batch(row):
        far = 0.5 * ((row["step"] - 1) % 4)
        return {"trustrl/kl_k3": far} if batch(row) < 2 else {"reward": 0.0, "frac_reward_zero_std": 1.0}

    assert names(run_of(dead_after_the_second_batch)) == ["learning rate too large", "no learning signal"]


def test_with_one_update_per_batch_jumps_of_the_entropy_show_the_learning_rate():
    run = run_of(
        lambda row: {"trustrl/entropy": 0.5 if row["step"] % 8 else 0.1, **falling(row)}, updates=1, batches=40
    )
    assert names(run) == ["learning rate too large"]


DEAD = {"reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "clip_share": 0.0, "trustrl/kl_k3": "gone"}
"""A batch after the policy broke: nothing is rewarded, so nothing moves."""


@pytest.mark.parametrize("first", [1, 2])
def test_one_update_per_batch_that_kills_the_policy_at_once_is_the_learning_rate(first):
    def killed(row):
        return DEAD | {"trustrl/entropy": 1.1} if row["step"] > first else {"trustrl/kl_k3": "gone"}

    assert names(run_of(killed, updates=1, batches=40))[0] == "learning rate too large"


def test_a_first_batch_that_kills_the_policy_is_the_learning_rate_though_later_batches_have_some_signal():
    def killed(row):
        some = {"reward": 0.03, "frac_reward_zero_std": 0.88, "clip_share": 0.06 * ((row["step"] - 1) % 4 > 0)}
        first = {"clip_share": 0.43 * (row["step"] > 1)}
        return {"trustrl/kl_k3": "gone", "trustrl/entropy": 0.4} | (first if batch(row) == 0 else some)

    assert names(run_of(killed, batches=20))[0] == "learning rate too large"


def test_updates_that_break_the_policy_in_the_first_batches_are_too_many_though_it_moves_little_later():
    def broken(row):
        far = 0.05 * ((row["step"] - 1) % 8) if batch(row, 8) < 3 else 0.0
        return {"trustrl/kl_k3": "gone", "clip_share": far, "reward": 0.3 if batch(row, 8) < 2 else 0.1}

    assert names(run_of(broken, updates=8)) == ["too many updates per batch"]


def test_updates_that_go_far_in_the_first_batches_without_harm_are_healthy():
    def moved(row):
        return {"trustrl/kl_k3": "gone", "clip_share": 0.05 * ((row["step"] - 1) % 8) * (batch(row, 8) < 3)}

    assert names(run_of(moved, updates=8)) == []


def test_a_collapse_of_the_entropy_while_the_reward_rises_is_not_laid_on_the_first_updates():
    def collapsing(row):
        far = {"clip_share": 0.05 * ((row["step"] - 1) % 8) * (batch(row, 8) < 3)}
        return {"trustrl/kl_k3": "gone", "trustrl/entropy": 0.5 * 0.6 ** batch(row, 8)} | far

    assert names(run_of(collapsing, updates=8)) == ["entropy collapse"]


def test_a_reward_that_breaks_off_without_a_large_update_is_not_the_learning_rate():
    def constant(row):
        return DEAD if row["step"] > 12 else {"trustrl/kl_k3": "gone"}

    assert names(run_of(constant, updates=1, batches=40)) == ["no learning signal"]


def test_a_jump_of_the_entropy_after_which_the_reward_recovers_is_not_the_learning_rate():
    def recovered(row):
        return {"trustrl/entropy": 1.1, "reward": 0.0} if row["step"] == 3 else {"trustrl/kl_k3": "gone"}

    assert names(run_of(recovered, updates=1, batches=40)) == []


def test_what_is_stopped_for_stale_weights_is_not_laid_on_the_updates():
    def stale(row):
        gap = 0.05 * batch(row)
        return {MISMATCH: gap, "trustrl/kl_k3": gap, "trustrl/masked_share": min(gap, 0.5), **falling(row)}

    assert names(run_of(stale)) == ["stale weights"]


def test_a_policy_that_moves_far_and_learns_is_left_alone():
    assert names(run_of(lambda row: {"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4)})) == []


def test_small_updates_that_add_up_and_a_fallen_reward_are_too_many_updates():
    run = run_of(lambda row: {"trustrl/kl_k3": 0.012 * ((row["step"] - 1) % 8), **falling(row, 80)}, updates=8)
    assert names(run) == ["too many updates per batch"]


def test_a_region_that_stops_much_at_the_end_of_batches_is_enough_for_too_many_updates():
    run = run_of(lambda row: {"trustrl/masked_share": 0.04 * ((row["step"] - 1) % 8)}, updates=8)
    assert names(run) == ["too many updates per batch"]


def test_groups_of_equal_rewards_are_no_learning_signal():
    assert names(run_of(lambda row: {"frac_reward_zero_std": 1.0, "reward": 0.0})) == ["no learning signal"]


@pytest.mark.parametrize(
    ("first", "said"),
    [pytest.param(1.0, "from the start", id="all"), pytest.param(0.0, "by the end", id="all but the first")],
)
def test_groups_are_equal_from_the_start_only_where_the_first_batch_has_them(first, said):
    def equal(row):
        return {"frac_reward_zero_std": first if row["step"] == 1 else 1.0, "reward": 0.0}

    (found,) = [one for one in explain(run_of(equal)).causes if one.name == "no learning signal"]
    assert said in found.reason
    assert (found.confidence == 1.0) is (said == "from the start")


def test_equal_rewards_in_the_last_batch_alone_are_noise():
    assert names(run_of(lambda row: {"frac_reward_zero_std": 1.0} if batch(row) == 9 else {})) == []


def test_equal_rewards_at_the_end_of_a_solved_task_are_healthy():
    def solved(row):
        return {"frac_reward_zero_std": 1.0, "reward": 1.0, "trustrl/entropy": 0.01} if row["step"] > 20 else {}

    assert names(run_of(solved)) == []


def test_a_gradient_of_zero_is_no_learning_signal_unless_the_region_masks_it():
    dead = {"frac_reward_zero_std": "gone", "grad_norm": 0.0, "reward": 0.2}
    assert names(run_of(lambda row: dead)) == ["no learning signal"]
    assert "no learning signal" not in names(run_of(lambda row: {**dead, "trustrl/masked_share": 1.0}))


@pytest.mark.parametrize(("reward", "found"), [(0.0, ["completions cut off"]), (0.5, [])])
def test_completions_that_are_cut_and_never_rewarded_are_named(reward, found):
    assert names(run_of(lambda row: {"completions/clipped_ratio": 0.9, "reward": reward})) == found


def test_completions_that_grow_to_the_limit_are_not_called_cut_from_the_start():
    run = run_of(lambda row: {"completions/clipped_ratio": 0.1 * batch(row), "reward": 0.0})
    assert names(run) == []


def far(row, updates=16):
    """A policy that a batch's updates carry far away."""
    return {"trustrl/kl_k3": 0.01 * ((row["step"] - 1) % updates)}


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        pytest.param([0.4, 0.3, 0.5, 0.3, 0.5, 0.6, 0.8, 0.3], [], id="one bad batch at the end"),
        pytest.param([0.3, 0.5, 0.3, 0.6, 0.2, 0.2, 0.2, 0.1], ["too many updates per batch"], id="three of them"),
    ],
)
def test_a_reward_that_fell_is_harm_from_three_batches_on(rewards, found):
    run = run_of(
        lambda row: {"reward": rewards[batch(row, 16)], "trustrl/entropy": 0.4, **far(row)}, updates=16, batches=8
    )
    assert names(run) == found


@pytest.mark.parametrize(("after", "found"), [(0.4, []), (0.2, ["too many updates per batch"])])
def test_a_held_out_accuracy_that_fell_is_harm(after, found):
    run = run_of(lambda row: far(row, 8), updates=8, evaluations=[(0, 0.4, 500), (80, after, 500)])
    assert names(run) == [*found, *["reward contradicts held-out accuracy"] * bool(found)]
    for cause in explain(run).causes:
        assert "held-out accuracy" in [one.metric for one in cause.numbers]


def test_held_out_accuracy_overrules_the_reward_of_training_batches():
    def fell(row):
        return {**far(row, 8), **falling(row, 80)}

    assert names(run_of(fell, updates=8)) == ["too many updates per batch"]
    assert names(run_of(fell, updates=8, evaluations=[(0, 0.4, 500), (80, 0.5, 500)])) == []


@pytest.mark.parametrize("evaluations", [[(0, 0.02, 16), (80, 0.0, 16)], [(0, 0.4, None), (80, 0.5, None)]])
def test_the_reward_decides_if_the_accuracy_could_not_have_fallen_or_has_no_count(evaluations):
    run = run_of(lambda row: {**far(row, 8), **falling(row, 80)}, updates=8, evaluations=evaluations)
    assert names(run) == ["too many updates per batch"]


def test_entropy_next_to_nothing_without_a_solved_task_is_a_collapse():
    run = run_of(lambda row: {"trustrl/entropy": 0.5 * math.exp(-row["step"] / 8), "reward": 0.3})
    assert names(run) == ["entropy collapse"]


def test_one_batch_without_entropy_is_no_collapse():
    assert names(run_of(lambda row: {"trustrl/entropy": 0.001, "reward": 0.3} if batch(row) == 9 else {})) == []


def test_entropy_that_more_than_doubles_is_an_explosion_unless_accuracy_rose():
    def rising(row):
        return {"trustrl/entropy": 0.5 + 0.1 * batch(row), "reward": 0.3}

    assert names(run_of(rising)) == ["entropy explosion"]
    assert names(run_of(rising, evaluations=[(0, 0.3, 500), (40, 0.6, 500)])) == []


def test_causes_come_before_what_they_may_cause():
    found = explain(run_of(lambda row: {MISMATCH: 2.0, "frac_reward_zero_std": 1.0, "reward": 0.0})).causes
    assert [one.name for one in found] == ["tied head not synced", "no learning signal"]
    assert found[0].confidence < found[1].confidence


def test_every_number_has_a_healthy_range_and_confidence_lies_between_zero_and_one():
    found = explain(run_of(lambda row: {MISMATCH: 2.0, **falling(row), "trustrl/kl_k3": 1.0})).causes
    assert found
    for cause in found:
        assert 0 <= cause.confidence <= 1
        assert all(number.healthy for number in cause.numbers)
        assert cause.action
