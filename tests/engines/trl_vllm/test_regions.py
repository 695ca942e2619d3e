"""Our trainer with a real vLLM: the recorded μ is μ, syncs arrive, and every kind of region trains."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import trustrl
from engines.rendezvous import own_environment

HERE = Path(__file__).parent


def train(folder, region, **options):
    """(rollouts, steps, stderr) of one run in a process of its own."""
    options = {"tied": True, "dtype": "float32", **options, "region": trustrl.config_to_dict(region)}
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "region_run.py"), str(folder), json.dumps(options)],
        capture_output=True, text=True, timeout=300,
        env=own_environment(PYTHONPATH=paths, HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"),
    )  # fmt: skip

    def found(word):
        return [json.loads(line.removeprefix(word)) for line in done.stdout.splitlines() if line.startswith(word)]

    return found("ROLLOUT "), found("STEP "), done


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


@pytest.mark.parametrize("name", REGIONS)
def test_what_is_recorded_is_the_distribution_that_sampled(name, tmp_path):
    """In float32, at every rollout (so after every sync, with a tied head), to 1e-4 nat, sampled token and top-K."""
    region = REGIONS[name]
    rollouts, steps, done = train(tmp_path, region)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (len(rollouts), len(steps)) == (2, 4)
    needs = region.needs()
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


@pytest.mark.parametrize("name", ["binary on μ", "top-K on μ, re-scored by vLLM"])
def test_experts_are_sampled_with_the_weights_that_were_trained(name, tmp_path):
    """A mixture of experts, in float32, over four rollouts and so at least as many weight syncs."""
    rollouts, steps, done = train(tmp_path, REGIONS[name], tied=False, experts=4, steps=8)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (len(rollouts), len(steps)) == (4, 8)
    assert all(rollout["gap_max"] < 1e-4 for rollout in rollouts)
    assert all(rollout.get("top_gap_max", 0.0) < 1e-4 for rollout in rollouts)
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert first["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-4)  # the weights that sampled
        assert abs(second["trustrl/log_ratio_p99"]) > 1e-3  # one update later


def test_a_temperature_reaches_the_re_scored_top_k(tmp_path):
    rollouts, _, done = train(tmp_path, topk("behavior"), temperature=0.6)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(rollout["gap_max"] < 1e-4 and rollout["top_gap_max"] < 1e-4 for rollout in rollouts)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_bf16_sampler_differs_by_its_dtype_and_no_more(tied, tmp_path):
    """The mismatch is real, is reported, and does not grow from sync to sync."""
    rollouts, steps, done = train(
        tmp_path, trustrl.preset("dppo-binary-tv"), dtype="bfloat16", tied=tied, mismatch=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rollout in rollouts:
        assert 1e-4 < rollout["gap_mean"] < 0.15
    for step in steps:
        assert 1e-4 < step["trustrl/mismatch_abs_mean"] < 0.15


def test_a_sync_that_does_nothing_is_found_before_the_first_step(tmp_path):
    _, steps, done = train(tmp_path, trustrl.preset("dppo-binary-tv"), break_sync=True)
    assert done.returncode != 0
    assert not steps
    assert "The sampler must follow the trainer's weights" in done.stderr


def test_trls_own_correction_goes_with_a_region_on_the_trainer(tmp_path):
    region = replace(trustrl.PPO(), anchor="proximal")
    _, steps, done = train(tmp_path, region, correction=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(steps) == 4
    assert "sampling/importance_sampling_ratio/mean" in steps[0]


def test_and_not_with_one_on_the_sampler(tmp_path):
    _, _, done = train(tmp_path, trustrl.preset("dppo-binary-tv"), correction=True)
    assert "vllm_importance_sampling_correction must be False" in done.stderr
