"""TRL's AsyncGRPOTrainer with a region: μ and version of every token are the sampler's, and stale ratios are seen.

The sampler is a real vLLM in the trainer's process. TRL's attention kernel and weight transfer need a GPU, so the run has
its own; TRL's rollout worker, which needs a vLLM server, is replaced through TRL's own argument for it.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl.experimental.async_grpo")

import trustrl
from support.refusal_examples import TRL_ASYNC, cases
from support.rendezvous import own_environment, python_path
from trustrl import regions
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import ASYNC
from trustrl.errors import ConfigError

pytestmark = pytest.mark.xdist_group("AsyncGRPOTrainer")
SCRIPT = Path(__file__).with_name("async_grpo_run.py")
REGIONS = {
    "PPO as TRL clips": regions.PPO(regions.Ratio(max_decrease=0.2, max_increase=0.2), action="clip"),
    "DPPO, at most one version old": regions.DPPO(max_staleness=1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    given = json.dumps({name: trustrl.config_to_dict(region) for name, region in REGIONS.items()})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("async")), given],
        capture_output=True, text=True, timeout=600, env=own_environment() | {"PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        kind, _, text = line.partition(" ")
        if kind == "RUN":
            found[json.loads(text)] = current = {"LOSS": [], "STEP": []}
        elif kind in ("LOSS", "STEP"):
            current[kind].append(json.loads(text))
    return found


@pytest.mark.parametrize("name", REGIONS)
def test_every_token_carries_the_samplers_log_prob_and_version(runs, name):
    losses, steps = runs[name]["LOSS"], runs[name]["STEP"]
    assert len(losses) == len(steps) == 5
    for loss, step in zip(losses, steps, strict=True):
        assert len(loss["exact"]) == 8
        assert all(loss["exact"])
        assert step["trustrl/tokens"] == len(loss["ages"])
        assert step["trustrl/staleness_mean"] == pytest.approx(sum(loss["ages"]) / len(loss["ages"]))
        assert step["trustrl/staleness_max"] == max(loss["ages"])
    assert {max(loss["ages"]) for loss in losses} == {0, 1, 2}


@pytest.mark.parametrize("name", REGIONS)
def test_the_ratio_of_fresh_tokens_is_1_and_that_of_stale_ones_is_not(runs, name):
    for loss, step in zip(runs[name]["LOSS"], runs[name]["STEP"], strict=True):
        if max(loss["ages"]) == 0:
            assert step["trustrl/gap_abs_mean"] < 1e-5
            assert step["trustrl/masked_share"] == 0
        else:
            assert step["trustrl/gap_abs_mean"] > 1e-2
            assert step["trustrl/masked_share"] > 0


def test_ppo_is_trls_own_loss(runs):
    for loss in runs["PPO as TRL clips"]["LOSS"]:
        assert loss["loss"] == pytest.approx(loss["stock"], rel=1e-5, abs=1e-6)
        assert loss["gradient"] < 1e-6 * max(loss["size"], 0.1)


def test_tokens_older_than_the_limit_leave_the_loss(runs):
    for loss, step in zip(*runs["DPPO, at most one version old"].values(), strict=True):
        assert step["trustrl/stale_share"] == (max(loss["ages"]) > 1)
        assert (loss["loss"] == 0) == (max(loss["ages"]) > 1)
        assert (step["grad_norm"] == 0) == (max(loss["ages"]) > 1)


@pytest.mark.parametrize("case", cases(ASYNC, TRL_ASYNC), ids=lambda case: f"{case.row.setting}: {case.row.must_be}")
def test_refused_settings_name_the_fix(case):
    region = replace(trustrl.preset(case.preset), **case.region)
    with pytest.raises(ConfigError, match=r"must be .* with a region, got "):
        rows.check(ASYNC, rows.reader(case.settings), region)
    rows.check(ASYNC, rows.reader({}), regions.DPPO())


def test_the_mixin_names_the_trainer_to_use_instead():
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from trustrl.engines.trl import TrustRegionMixin

    class Mine(TrustRegionMixin, AsyncGRPOTrainer):
        pass

    with pytest.raises(ConfigError, match=r"For AsyncGRPOTrainer.*TrustRegionAsyncGRPOTrainer"):
        Mine(region=regions.DPPO())
