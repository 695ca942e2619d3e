"""Folders made by hand with one seeded symptom each, and what must be said about them."""

import math
import random
import sys
from dataclasses import replace

import pytest

from support.recipes import small
from support.run_folders import write_records
from trustrl.errors import RecordError
from trustrl.runner.directory import RunDirectory
from trustrl.tools.explain.explanation import explain

MISMATCH = "trustrl/mismatch_abs_mean"
RATIO = "trustrl/mismatch_ratio_mean"
STEPS = 40


def healthy(step, updates):
    """A step of a run that learns: entropy falls a little, the policy moves a little within a batch."""
    update = (step - 1) % updates
    return {
        "step": step, "loss": -0.1, "grad_norm": 0.3, "reward": 0.3 + 0.5 * step / STEPS, "frac_reward_zero_std": 0.1,
        "frac_reward_nan": 0.0,
        "trustrl/entropy": 0.5 - 0.2 * step / STEPS, "trustrl/kl_k3": 0.001 * update, "trustrl/masked_share": 0.002 * update,
        MISMATCH: 1e-5, RATIO: 1.0, "trustrl/dropped_share": 0.0, "trustrl/fault_advantage": 0.0,
        "trustrl/fault_policy": 0.0,
    }  # fmt: skip


def folder(path, change=lambda row: {}, *, updates=4, dtype="float32"):
    """A run's folder whose rows are the healthy ones with `change(row)` laid over."""
    recipe = small("region.preset=dppo-binary-tv", f"schedule.updates_per_batch={updates}")
    recipe = replace(recipe, sampler=replace(recipe.sampler, kind="vllm", dtype=dtype))
    run = RunDirectory(path)
    run.begin(recipe, resume=False)
    for step in range(1, STEPS + 1):
        row = healthy(step, updates)
        run.append("metrics", row | change(row))
    return path


def names(path):
    return [found.name for found in explain(path)]


def batch(row, updates=4):
    return (row["step"] - 1) // updates


def falling(row):
    """A reward that rose and is gone by the end."""
    return {"reward": 0.6 if row["step"] < STEPS / 2 else 0.05}


@pytest.mark.parametrize("updates", [1, 4])
def test_nothing_is_found_in_a_healthy_run(tmp_path, updates):
    assert names(folder(tmp_path / "run", updates=updates)) == []


def test_a_run_without_a_step_is_not_called_healthy(tmp_path):
    RunDirectory(tmp_path / "run").begin(small(), resume=False)
    with pytest.raises(RecordError, match="has no metrics"):
        explain(tmp_path / "run")


def test_a_region_nobody_registered_here_is_explained_by_its_numbers(tmp_path):
    path = folder(tmp_path / "run", lambda row: {"frac_reward_zero_std": 1.0, "reward": 0.0})
    text = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(text.split("[region]")[0] + '[region]\nkind = "mine"\nwidth = 0.3\n')
    assert names(path) == ["no learning signal"]


def test_a_mismatch_that_was_never_finite_breaks_no_rule(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: math.nan, RATIO: 0.5})) == []


def test_a_gap_that_grows_from_nothing_is_stale_weights(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: 0.01 * batch(row)})) == ["stale weights"]


def test_the_gap_of_a_sampler_in_half_precision_is_healthy(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: 0.02}, dtype="bfloat16")) == []


def test_a_ratio_below_one_by_as_much_as_the_gap_is_truncated_support(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: 0.03, RATIO: 0.971})) == ["truncated support"]


def test_a_ratio_far_below_one_with_a_gap_of_nats_is_no_truncation(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: 1.5, RATIO: 0.1})) == ["tied head not synced"]


def test_a_gap_that_outgrows_its_own_start_is_stale_in_half_precision_too(tmp_path):
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 0.001 + 0.004 * batch(row)}, dtype="bfloat16")
    assert names(path) == ["stale weights"]


def test_truncation_shows_below_the_noise_of_half_precision(tmp_path):
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 0.01, RATIO: 0.992}, dtype="bfloat16")
    assert names(path) == ["truncated support"]


def test_without_records_a_gap_within_the_entropy_is_a_temperature_and_half_as_sure(tmp_path):
    (found,) = explain(folder(tmp_path / "run", lambda row: {MISMATCH: 0.2}))
    assert found.name == "wrong temperature"
    assert found.confidence <= 0.5


def test_without_records_a_gap_beyond_the_entropy_is_other_weights(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {MISMATCH: 2.0})) == ["tied head not synced"]


def sampled(scale, *, count=400, ids=8, noise=0.0, seed=0):
    """Log-probs of tokens drawn from softmax(scale · logits), and the trainer's, whose logits may have noise of their own."""
    draw = random.Random(seed)
    sampler, trainer = [], []
    for _ in range(count):
        logits = [draw.gauss(0, 2) for _ in range(ids)]
        ours = [scale * one for one in logits]
        theirs = [one + draw.gauss(0, noise) for one in logits]
        mine, other = (math.log(sum(map(math.exp, side))) for side in (ours, theirs))
        token = draw.choices(range(ids), [math.exp(one - mine) for one in ours])[0]
        sampler.append(ours[token] - mine)
        trainer.append(theirs[token] - other)
    return {"behavior_logp": sampler, "proximal_logp": trainer}


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4])
def test_records_show_a_temperature_of_any_size(tmp_path, temperature):
    pytest.importorskip("pyarrow")
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 2.0})
    write_records(path / "records", sampled(1 / temperature))
    (found,) = explain(path)
    assert found.name == "wrong temperature"
    assert found.confidence > 0.5


def test_records_show_a_temperature_below_the_noise_of_half_precision(tmp_path):
    pytest.importorskip("pyarrow")
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 0.03}, dtype="bfloat16")
    assert names(path) == []
    write_records(path / "records", sampled(1 / 0.9))
    assert names(path) == ["wrong temperature"]


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_records_show_other_weights_of_any_size(tmp_path, noise):
    pytest.importorskip("pyarrow")
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 0.2})
    write_records(path / "records", sampled(1.0, noise=noise))
    assert names(path) == ["tied head not synced"]


def test_records_that_cannot_be_read_are_said(tmp_path):
    pytest.importorskip("pyarrow")
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 0.2})
    (path / "records").mkdir()
    assert names(path) == ["wrong temperature"]
    (path / "records" / "step-00000000.rank-0000.parquet").write_bytes(b"no Parquet")
    with pytest.raises(RecordError, match=r"step-00000000\.rank-0000\.parquet"):
        explain(path)


def test_without_pyarrow_records_leave_the_metrics_to_speak(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    path = folder(tmp_path / "run", lambda row: {MISMATCH: 2.0})
    write_records(path / "records", sampled(1 / 0.8))
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert names(path) == ["tied head not synced"]


def test_a_fault_in_the_advantages_is_named_with_its_first_step(tmp_path):
    path = folder(
        tmp_path / "run",
        lambda row: {"trustrl/fault_advantage": 5.0, "trustrl/dropped_share": 0.1} if row["step"] >= 7 else {},
    )
    (found,) = explain(path)
    assert (found.name, found.confidence) == ("non-finite values", 1.0)
    assert {(one.metric, one.step, one.value) for one in found.numbers} == {
        ("trustrl/fault_advantage", 7, 5.0),
        ("trustrl/dropped_share", 7, 0.1),
    }


def test_a_reward_that_is_no_number_came_in_with_the_batch(tmp_path):
    (found,) = explain(folder(tmp_path / "run", lambda row: {"reward": math.nan} if row["step"] == 3 else {}))
    assert found.name == "non-finite values"
    assert "The inputs contain them" in found.reason


def test_a_reward_that_trl_left_out_came_in_with_the_batch(tmp_path):
    path = folder(tmp_path / "run", lambda row: {"frac_reward_nan": 0.01 if row["step"] == 21 else 0.0})
    (found,) = explain(path)
    assert (found.name, found.order.name, found.confidence) == ("non-finite values", "INPUT", 1.0)
    assert [(one.metric, one.step, one.value) for one in found.numbers] == [("frac_reward_nan", 21, 0.01)]


def test_one_update_that_goes_far_and_a_fallen_reward_are_the_learning_rate(tmp_path):
    path = folder(tmp_path / "run", lambda row: {"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4), **falling(row)})
    assert names(path) == ["learning rate too large"]


def test_batches_without_a_gradient_do_not_hide_the_learning_rate(tmp_path):
    def dead_after_the_second_batch(row):
        far = 0.5 * ((row["step"] - 1) % 4)
        return {"trustrl/kl_k3": far} if batch(row) < 2 else {"reward": 0.0, "frac_reward_zero_std": 1.0}

    assert names(folder(tmp_path / "run", dead_after_the_second_batch)) == [
        "learning rate too large",
        "no learning signal",
    ]


def test_with_one_update_per_batch_jumps_of_the_entropy_show_the_learning_rate(tmp_path):
    path = folder(
        tmp_path / "run", lambda row: {"trustrl/entropy": 0.5 if row["step"] % 8 else 0.1, **falling(row)}, updates=1
    )
    assert names(path) == ["learning rate too large"]


def test_what_is_stopped_for_stale_weights_is_not_laid_on_the_updates(tmp_path):
    def stale(row):
        gap = 0.05 * batch(row)
        return {MISMATCH: gap, "trustrl/kl_k3": gap, "trustrl/masked_share": min(gap, 0.5), **falling(row)}

    assert names(folder(tmp_path / "run", stale)) == ["stale weights"]


def test_a_policy_that_moves_far_and_learns_is_left_alone(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {"trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4)})) == []


def test_small_updates_that_add_up_and_a_fallen_reward_are_too_many_updates(tmp_path):
    path = folder(
        tmp_path / "run", lambda row: {"trustrl/kl_k3": 0.012 * ((row["step"] - 1) % 8), **falling(row)}, updates=8
    )
    assert names(path) == ["too many updates per batch"]


def test_a_region_that_stops_much_at_the_end_of_batches_is_enough_for_too_many_updates(tmp_path):
    path = folder(tmp_path / "run", lambda row: {"trustrl/masked_share": 0.04 * ((row["step"] - 1) % 8)}, updates=8)
    assert names(path) == ["too many updates per batch"]


def test_groups_of_equal_rewards_are_no_learning_signal(tmp_path):
    assert names(folder(tmp_path / "run", lambda row: {"frac_reward_zero_std": 1.0, "reward": 0.0})) == [
        "no learning signal"
    ]


@pytest.mark.parametrize(
    ("first", "said"),
    [pytest.param(1.0, "from the start", id="all"), pytest.param(0.0, "by the end", id="all but the first")],
)
def test_groups_are_equal_from_the_start_only_where_the_first_step_has_them(tmp_path, first, said):
    def equal(row):
        return {"frac_reward_zero_std": first if row["step"] == 1 else 1.0, "reward": 0.0}

    (found,) = [one for one in explain(folder(tmp_path / "run", equal)) if one.name == "no learning signal"]
    assert said in found.reason
    assert (found.confidence == 1.0) is (said == "from the start")


def test_equal_rewards_at_the_end_of_a_solved_task_are_healthy(tmp_path):
    def solved(row):
        return {"frac_reward_zero_std": 1.0, "reward": 1.0, "trustrl/entropy": 0.01} if row["step"] > 20 else {}

    assert names(folder(tmp_path / "run", solved)) == []


def far(row, updates=16):
    """A policy that a batch's updates carry far away."""
    return {"trustrl/kl_k3": 0.01 * ((row["step"] - 1) % updates)}


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        pytest.param([0.4, 0.3, 0.5, 0.3, 0.5, 0.6, 0.8, 0.3], [], id="one bad rollout at the end"),
        pytest.param([0.3, 0.5, 0.3, 0.6, 0.2, 0.2, 0.2, 0.1], ["too many updates per batch"], id="three of them"),
    ],
)
def test_a_reward_that_fell_is_harm_from_three_rollouts_on(tmp_path, rewards, found):
    run = RunDirectory(tmp_path / "run")
    run.begin(small("schedule.steps=128", "schedule.updates_per_batch=16"), resume=False)
    for step in range(1, 129):
        row = healthy(step, 16) | {"reward": rewards[(step - 1) // 16], "trustrl/entropy": 0.4}
        run.append("metrics", row | far(row))
    assert names(tmp_path / "run") == found


@pytest.mark.parametrize(("after", "found"), [(0.5, []), (0.2, ["too many updates per batch"])])
def test_a_held_out_accuracy_that_fell_is_harm(tmp_path, after, found):
    path = folder(tmp_path / "run", lambda row: far(row, 8), updates=8)
    for step, accuracy in ((0, 0.4), (STEPS, after)):
        RunDirectory(path).append("evaluation", {"step": step, "accuracy": accuracy, "count": 500})
    assert names(path) == found
    assert ["held-out accuracy" in [one.metric for one in cause.numbers] for cause in explain(path)] == [True] * len(
        found
    )


def test_entropy_next_to_nothing_without_a_solved_task_is_a_collapse(tmp_path):
    path = folder(tmp_path / "run", lambda row: {"trustrl/entropy": 0.5 * math.exp(-row["step"] / 8), "reward": 0.3})
    assert names(path) == ["entropy collapse"]


def test_causes_come_before_what_they_may_cause(tmp_path):
    def dead(row):
        return {MISMATCH: 2.0, "frac_reward_zero_std": 1.0, "reward": 0.0}

    found = explain(folder(tmp_path / "run", dead))
    assert [one.name for one in found] == ["tied head not synced", "no learning signal"]
    assert found[0].confidence < found[1].confidence


def test_every_number_has_a_healthy_range_and_confidence_lies_between_zero_and_one(tmp_path):
    for found in explain(folder(tmp_path / "run", lambda row: {MISMATCH: 2.0, **falling(row), "trustrl/kl_k3": 1.0})):
        assert 0 <= found.confidence <= 1
        assert all(number.healthy for number in found.numbers)
        assert found.action
