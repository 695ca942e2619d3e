"""Recipes on verl's `main_ppo` and Ray, end to end: the sampler starts from random weights, so every ratio of 1 is a sync
that worked; and what the tools that read a run's folder say about them."""

import json
import os

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

import numpy as np

from support.tracked_metrics import READERS
from support.verl_cpu_runs import STEPS, trained
from trustrl.cli import main
from trustrl.engines.common.seam import version_of
from trustrl.recording import read
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import load
from trustrl_verl_cpu.vllm_server import VARIABLE

ROLLOUT = "engine.settings.actor_rollout_ref.rollout"
ACTOR = "engine.settings.actor_rollout_ref.actor"
CRITIC = [
    "engine.settings.algorithm.adv_estimator=gae", "engine.settings.critic.model.path={model}",
    "engine.settings.critic.ppo_mini_batch_size=8", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.001",
]  # fmt: skip
BYPASS = "engine.settings.algorithm.rollout_correction.bypass_mode=true"
RUNS = {
    "TROLL: transformers, two ranks, a critic and a reference": [
        "region.preset=troll", "engine.ranks_per_node=2", "logging.tracker=tensorboard", *CRITIC,
    ],
    "Top-K: vLLM at temperature 0.8": [
        "region.preset=dppo-topk-tv", "sampler.kind=vllm", "sampler.temperature=0.8", BYPASS,
    ],
    "Binary: vLLM at top-p 0.9": [
        "region.preset=dppo-binary-tv", "sampler.kind=vllm", "logging.tracker=wandb", f"{ROLLOUT}.top_p=0.9", BYPASS,
    ],
}  # fmt: skip
LOGGED = {
    "troll": {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss", "actor/trustrl/projected_share"},
    "dppo": {"actor/trustrl/divergence_mean"},
}

MARKS = {name: (pytest.mark.long,) for name in RUNS if "vLLM" in name}

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, id=name, marks=[pytest.mark.xdist_group(name), *MARKS.get(name, ())]) for name in RUNS],
)
def run(request, tmp_path_factory):
    """The folder of a run; the model is random and is rewarded for some letters more than for others."""
    settings = RUNS[request.param]
    if "sampler.kind=vllm" in settings and not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set")
    folder = tmp_path_factory.mktemp("verl")
    code, said = trained(folder, settings, listened=LISTENED.setdefault(folder / "run", set()))
    assert code == 0, said[-6000:]
    return folder / "run"


LISTENED = {}
"""The addresses on which the processes of each run listened."""


def test_every_process_of_a_run_listens_on_loopback_alone(run):
    assert len(LISTENED[run]) > 5  # Ray's own alone are more
    assert {(str(host), port) for host, port in LISTENED[run] if not host.is_loopback} == set()


@pytest.mark.long
@pytest.mark.xdist_group("experts")
@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set")
def test_thirty_steps_of_a_mixture_of_experts_leave_no_gap(tmp_path):
    """In float32, with vLLM and a weight sync per step: the mismatch of every token of all steps."""
    settings = ["region.preset=dppo-binary-tv", "sampler.kind=vllm", BYPASS]
    code, said = trained(tmp_path, [*settings, "schedule.steps=30", "schedule.checkpoint_every=30"], experts=4)
    assert code == 0, said[-6000:]
    found = read(tmp_path / "run" / "records")
    gap = (found["policy_logp"] - found["behavior_logp"]).abs()
    print("largest gap", gap.max().item(), "tokens", len(gap))
    assert len(found["step"].unique()) == 30
    assert found["update"].max() == 0  # the policy of each row is the one that sampled
    assert 0 < gap.max() <= 1e-4
    moved = RunDirectory(tmp_path / "run").rows()
    assert min(row["grad_norm"] for row in moved) > 1e-3


def test_the_tracker_has_the_numbers_of_the_metrics_file(run):
    tracker = load(run / "recipe.toml").logging.tracker
    if tracker is None:
        pytest.skip("this run has no tracker")
    found = READERS[tracker](run)
    stored = np.float32 if tracker == "tensorboard" else float
    for row in RunDirectory(run).rows():
        ours = {name: value for name, value in row.items() if name.startswith("trustrl/")}
        assert len(ours) > 50
        theirs = {name: found[f"actor/{name}"][row["step"]] for name in ours}
        assert theirs == {name: stored(value) for name, value in ours.items()}


def test_every_step_begins_with_the_policy_that_sampled(run):
    rows = RunDirectory(run).rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["grad_norm"] > 1e-3  # so that later ratios are those of weights that moved
    for row in rows:
        assert row["trustrl/gap_abs_mean"] < 1e-4
        assert abs(row["trustrl/ratio_mean"] - 1) < 1e-4
        assert row["trustrl/kl_k3"] < 1e-4
        assert row["trustrl/staleness_max"] == 0
        assert row["trustrl/tokens"] > 0
    said = (run / "verl.log").read_text()
    for name in LOGGED[RunDirectory(run).result()["region"]["kind"]]:
        assert said.count(f"{name}:") >= STEPS, name


def asked(capsys, verb, folder):
    """What a verb says about a run, and its exit code."""
    code = main([verb, str(folder), "--json"])
    return json.loads(capsys.readouterr().out), code


def test_the_tools_that_read_a_run_agree_with_its_metrics(run, capsys):
    tokens = sum(row["trustrl/tokens"] for row in RunDirectory(run).rows())
    is_mask = RunDirectory(run).result()["region"]["kind"] == "dppo"

    reported, code = asked(capsys, "report", run)
    (one,) = reported["runs"]
    assert (code, one["status"], one["steps"]) == (0, "finished", STEPS)
    assert one["tokens"]["recorded"] == one["tokens"]["read"] == tokens
    assert one["tokens"]["verdicts"]["not finite"] == 0

    audited, code = asked(capsys, "audit", run)
    assert (code, audited["rows"]) == (0, tokens)
    assert audited["reproduced"]["rows"] == (tokens if is_mask else 0)  # no record tells what TROLL projects
    assert audited["reproduced"]["kept_differs"] == 0
    assert audited["regions"]["dppo-binary-tv"]["measured"] == tokens
    ages = [(one["bin"], one["regions"]["recorded"]["tokens"]) for one in audited["by"]["age"]["bins"]]
    assert ages == [("0", audited["signed"])]  # one update a batch

    calibrated, code = asked(capsys, "calibrate", run)
    assert (code, calibrated["noise"]) == (1, tokens)  # too few for a recommendation
    assert calibrated["noise"] < calibrated["needed"]

    explained, code = asked(capsys, "explain", run)
    assert (code, explained["findings"]) == (0, [])
