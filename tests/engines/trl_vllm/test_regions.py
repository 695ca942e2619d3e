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

pytestmark = pytest.mark.xdist_group("regions with vLLM")
SCRIPT = Path(__file__).with_name("region_run.py")


def topk(anchor):
    return trustrl.DPPO(trustrl.TopKTV(k=32), anchor=anchor)


REGIONS = {
    "binary on μ": trustrl.preset("dppo-binary-tv"),
    "top-K on μ, re-scored by vLLM": topk("behavior"),
    "top-K on π'": topk("proximal"),
    "TROLL on μ": trustrl.preset("troll", anchor="behavior"),
    "exact TV on π'": trustrl.DPPO(trustrl.FullTV(), anchor="proximal"),
    "both anchors": trustrl.preset("minirl"),
}


BINARY = REGIONS["binary on μ"]
RECORDED = ["binary on μ", "top-K on μ, re-scored by vLLM"]
RUNS = {  # experts first: vLLM makes their process groups with the first engine or never
    **{f"experts, {name}": {"region": REGIONS[name], "tied": False, "experts": 4, "steps": 8} for name in RECORDED},
    **{name: {"region": region} for name, region in REGIONS.items()},
    "temperature": {"region": topk("behavior"), "temperature": 0.6},
    **{
        f"bf16, {name}": {"region": BINARY, "dtype": "bfloat16", "tied": tied, "mismatch": True}
        for name, tied in (("tied", True), ("untied", False))
    },
    "a sync that does nothing": {"region": BINARY, "break_sync": True},
    "a correction and a region on the trainer": {
        "region": replace(trustrl.PPO(), anchor="proximal"),
        "correction": True,
    },
    "a correction and a region on the sampler": {"region": BINARY, "correction": True},
}


class Run(NamedTuple):
    rollouts: list
    steps: list
    error: str


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
        capture_output=True, text=True, timeout=900,
        env=own_environment(PYTHONPATH=python_path(), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, now = {}, None
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word == "RUN":
            now = json.loads(rest)
            found[now] = Run([], [], "")
        elif word in ("ROLLOUT", "STEP"):
            getattr(found[now], {"ROLLOUT": "rollouts", "STEP": "steps"}[word]).append(json.loads(rest))
        elif word == "ERROR":
            found[now] = found[now]._replace(error=json.loads(rest))
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


def test_a_temperature_reaches_the_re_scored_top_k(finished):
    rollouts, _ = finished("temperature")
    assert len(rollouts) == 2
    assert all(rollout["gap_max"] < 1e-4 and rollout["top_gap_max"] < 1e-4 for rollout in rollouts)


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
