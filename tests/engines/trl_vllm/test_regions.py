"""Our trainer with a real vLLM: the recorded μ is μ, syncs arrive, and every kind of region trains."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import trustrl
from support.rendezvous import own_environment, python_path
from trustrl import regions

pytestmark = pytest.mark.xdist_group("regions with vLLM")
SCRIPT = Path(__file__).with_name("region_run.py")


def topk(anchor):
    return regions.DPPO(regions.TopKTV(k=32), anchor=anchor)


REGIONS = {
    "binary on μ": trustrl.preset("dppo-binary-tv"),
    "top-K on μ, recorded while vLLM decodes": topk("behavior"),
    "top-K on π'": topk("proximal"),
    "TROLL on μ": trustrl.preset("troll", anchor="behavior"),
    "exact TV on π'": regions.DPPO(regions.FullTV(), anchor="proximal"),
    "both anchors": trustrl.preset("minirl"),
}


BINARY = REGIONS["binary on μ"]
RECORDED = ["binary on μ", "top-K on μ, recorded while vLLM decodes"]
TRUNCATED = {
    "top-p, binary on μ": (BINARY, {"top_p": 0.9}),
    "top-p, top-K on μ": (topk("behavior"), {"top_p": 0.8}),
    "top-k, top-K on π'": (topk("proximal"), {"top_k": 20}),
    "min-p, TROLL on μ": (REGIONS["TROLL on μ"], {"min_p": 0.3}),
    "top-p, both anchors": (REGIONS["both anchors"], {"top_p": 0.9}),
}
RUNS = {  # experts first: vLLM makes their process groups with the first engine or never
    **{f"experts, {name}": {"region": REGIONS[name], "tied": False, "experts": 4, "steps": 8} for name in RECORDED},
    "experts, thirty syncs": {
        "region": BINARY,
        "tied": False,
        "experts": 4,
        "steps": 30,
        "iterations": 1,
        "mismatch": True,
        "record": True,
    },
    "experts, bf16": {
        "region": BINARY,
        "tied": False,
        "experts": 4,
        "steps": 8,
        "iterations": 1,
        "mismatch": True,
        "record": True,
        "dtype": "bfloat16",
    },
    "experts of a dense model": {"region": BINARY, "record": True},
    **{name: {"region": region} for name, region in REGIONS.items()},
    "temperature": {"region": topk("behavior"), "temperature": 0.6},
    **{
        f"bf16, {name}": {"region": BINARY, "dtype": "bfloat16", "tied": tied, "mismatch": True}
        for name, tied in (("tied", True), ("untied", False))
    },
    "a sync that does nothing": {"region": BINARY, "break_sync": True},
    "a correction and a region on the trainer": {
        "region": replace(regions.PPO(), anchor="proximal"),
        "correction": True,
    },
    "a correction and a region on the sampler": {"region": BINARY, "correction": True},
    **{name: {"region": region, "truncation": truncation} for name, (region, truncation) in TRUNCATED.items()},
    "tools": {"region": topk("behavior"), "tools": True},
    "top-p without the kept set": {"region": BINARY, "truncation": {"top_p": 0.9}, "forget_kept": True},
    "top-p beyond the limit": {"region": BINARY, "truncation": {"top_p": 0.9}, "max_kept": 50},
}


class Run(NamedTuple):
    rollouts: list
    steps: list
    error: str
    record: dict


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, in one process: starting vLLM takes longer than the steps of a run."""
    usual = {"tied": True, "dtype": "float32"}
    given = {
        name: {**usual, **options, "region": trustrl.config_to_dict(options["region"])}
        for name, options in RUNS.items()
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("regions")), json.dumps(given)],
        capture_output=True, text=True, timeout=1500,
        env=own_environment(PYTHONPATH=python_path(), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, now = {}, None
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word == "RUN":
            now = json.loads(rest)
            found[now] = Run([], [], "", {})
        elif word in ("ROLLOUT", "STEP"):
            getattr(found[now], {"ROLLOUT": "rollouts", "STEP": "steps"}[word]).append(json.loads(rest))
        elif word == "ERROR":
            found[now] = found[now]._replace(error=json.loads(rest))
        elif word == "RECORD":
            found[now].record.update(json.loads(rest))
    assert found.keys() == RUNS.keys()
    return found


@pytest.fixture
def finished(runs):
    """`finished(name)`: (rollouts, steps) of a run without an error."""

    def get(name):
        assert not runs[name].error, runs[name].error
        return runs[name].rollouts, runs[name].steps

    return get


@pytest.mark.parametrize("name", REGIONS)
def test_what_is_recorded_is_the_distribution_that_sampled(name, finished):
    """In float32, at every rollout (so after every sync, with a tied head), to 1e-4 nat, sampled token and top-K."""
    rollouts, steps = finished(name)
    assert (len(rollouts), len(steps)) == (2, 4)
    needs = REGIONS[name].needs()
    for rollout in rollouts:
        if "behavior" in needs.anchors:
            assert rollout["gap_max"] < 1e-4
        if needs.topk:
            assert rollout["k"] == needs.topk
            assert rollout["top_gap_max"] < 1e-4
    assert steps[0]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)  # nothing has moved yet
    assert abs(steps[1]["trustrl/log_ratio_p99"]) > 1e-3  # and now it has
    assert steps[2]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)  # the new weights arrived
    assert all(step["trustrl/loss_weight"] == pytest.approx(1, abs=1e-5) for step in steps)


GAP = "trustrl/decode_prefill_gap"


def test_the_gap_between_decode_and_prefill_is_logged_for_every_checked_rollout(finished):
    _, steps = finished("binary on μ")
    gaps = [(step[GAP], step[f"{GAP}_max"]) for step in steps if GAP in step]
    assert len(gaps) == 2  # one per rollout
    assert all(0 <= mean <= largest < 1e-4 for mean, largest in gaps)  # test_sampler_check.py: not so in bf16


def test_the_gap_is_not_reported_where_prefill_scores_another_distribution(finished):
    _, steps = finished("temperature")
    assert not any(GAP in step for step in steps)


@pytest.mark.parametrize("name", RECORDED)
def test_experts_are_sampled_with_the_weights_that_were_trained(name, finished):
    """A mixture of experts, in float32, over four rollouts and so at least as many weight syncs."""
    rollouts, steps = finished(f"experts, {name}")
    assert (len(rollouts), len(steps)) == (4, 8)
    assert all(rollout["gap_max"] < 1e-4 for rollout in rollouts)
    assert all(rollout.get("top_gap_max", 0.0) < 1e-4 for rollout in rollouts)
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert first["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)  # the weights that sampled
        assert abs(second["trustrl/log_ratio_p99"]) > 1e-3  # one update later


def test_thirty_steps_of_a_mixture_of_experts_leave_no_gap(runs, finished):
    """In float32: one rollout, one weight sync and one update per step, and the mismatch of every token of all steps."""
    rollouts, steps = finished("experts, thirty syncs")
    record = runs["experts, thirty syncs"].record
    print("largest gap", record["gap_max"], "tokens", record["rows"])
    assert (len(rollouts), len(steps), record["steps"]) == (30, 30, 30)
    assert max(rollout["gap_max"] for rollout in rollouts) <= 1e-4
    assert max(step["trustrl/mismatch_abs_mean"] for step in steps) <= 1e-4
    assert record["gap_max"] <= 1e-4
    assert steps[0]["trustrl/mismatch_abs_mean"] > 0  # it is measured


def test_vllms_routing_is_recorded_at_the_token_whose_log_prob_it_made(runs, finished):
    rollouts, _ = finished("experts, thirty syncs")
    assert all(rollout["same_experts"] == 1.0 and rollout["layers"] == 2 for rollout in rollouts)
    record = runs["experts, thirty syncs"].record
    assert record["experts"] == [record["rows"], 2 * 2]
    assert (record["dtype"], record["lowest"], record["highest"]) == ("torch.int16", 0, 3)


def test_a_bf16_sampler_routes_some_tokens_to_other_experts(finished):
    rollouts, _ = finished("experts, bf16")
    same = [rollout["same_experts"] for rollout in rollouts]
    assert 0.5 < min(same) < 1.0


def test_a_dense_model_has_no_experts_to_record(runs):
    assert "recording.experts must be False for a dense model" in runs["experts of a dense model"].error


def test_a_temperature_reaches_the_recorded_top_k(finished):
    rollouts, _ = finished("temperature")
    assert len(rollouts) == 2
    assert all(rollout["gap_max"] < 1e-4 and rollout["top_gap_max"] < 1e-4 for rollout in rollouts)


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_sampling_has_a_first_ratio_of_one_inside_the_kept_set(name, finished):
    """In float32, to 1e-4. Without the kept set the same log-probs differ by tenths of a nat."""
    rollouts, steps = finished(name)
    assert (len(rollouts), len(steps)) == (2, 4)
    needs = TRUNCATED[name][0].needs()
    for rollout in rollouts:
        assert rollout["gap_max"] < 1e-4
        assert rollout["gap_without_kept"] > 0.05
        assert 1 < rollout["kept_mean"] < 450
        assert rollout.get("top_gap_max", 0.0) < 1e-4
        assert rollout.get("k", 0) == needs.topk
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert first["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert first["trustrl/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert abs(second["trustrl/log_ratio_p99"]) > 1e-3
        assert first["trustrl/dropped_share"] == second["trustrl/dropped_share"] == 0


def test_without_the_kept_set_the_first_ratio_is_not_one(finished):
    """The check above, on the same run with the whole vocabulary as its kept sets."""
    _, steps = finished("top-p without the kept set")
    assert steps[0]["trustrl/ratio_mean"] == pytest.approx(0.9, abs=0.02)


def test_more_kept_ids_than_the_limit_end_the_run_with_the_figure(runs):
    assert "must keep at most 50 ids at each token" in runs["top-p beyond the limit"].error


def test_a_tool_loop_records_what_the_sampler_answered_in_each_turn(finished):
    """μ, top-K and version of every token, exactly. The model is random: the parser takes every answer for a call."""
    rollouts, steps = finished("tools")
    assert (len(rollouts), len(steps)) == (2, 4)
    for rollout in rollouts:
        assert rollout["different"] == 0
        assert rollout["compared"] > 4 * rollout["completions"]
        assert rollout["turns"] == 4
        assert rollout["requests"] == 4 * rollout["completions"]  # one for each turn, and none to score
        assert rollout["tool_tokens"] > 0
        assert rollout["turn_of_tools"] == [-1]
        assert rollout["versions"] == [rollout["step"]]
    assert steps[0]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert steps[2]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_bf16_sampler_differs_by_its_dtype_and_no_more(tied, finished):
    """The mismatch is real, is reported, and does not grow from sync to sync."""
    rollouts, steps = finished(f"bf16, {tied}")
    assert (len(rollouts), len(steps)) == (2, 4)
    for rollout in rollouts:
        assert 1e-4 < rollout["gap_mean"] < 0.15
    for step in steps:
        assert 1e-4 < step["trustrl/mismatch_abs_mean"] < 0.15


def test_a_sync_that_does_nothing_is_found_before_the_first_step(runs):
    found = runs["a sync that does nothing"]
    assert not found.steps
    assert "The sampler must follow the trainer's weights" in found.error


def test_trls_own_correction_goes_with_a_region_on_the_trainer(finished):
    _, steps = finished("a correction and a region on the trainer")
    assert len(steps) == 4
    assert "sampling/importance_sampling_ratio/mean" in steps[0]


def test_and_not_with_one_on_the_sampler(runs):
    assert "vllm_importance_sampling_correction must be False" in runs["a correction and a region on the sampler"].error
