"""Recipes on verl's `main_ppo` and Ray, end to end: the sampler starts from random weights, so every ratio of 1 is a sync
that worked; and what the tools that read a run's folder say about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.tiny_models import save_model
from trustrl.cli import main
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl_cpu.vllm_server import VARIABLE
from trustrl.runner.directory import RunDirectory

ROOT = Path(__file__).parents[3]
STEPS = 3
SMALL = [
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={STEPS}", "schedule.prompts_per_step=8",
    "schedule.completions_per_prompt=4", "schedule.updates_per_batch=1", "schedule.max_prompt_tokens=16",
    "schedule.max_completion_tokens=8", "optimiser.learning_rate=3e-3", "evaluation.count=8", "task.problems=64",
    "records.sample=1",
    f"engine.settings.reward.custom_reward_function.path={Path(__file__).with_name('verl_letters_reward.py')}",
]  # fmt: skip
ACTOR = "engine.settings.actor_rollout_ref.actor"
CRITIC = [
    "engine.settings.algorithm.adv_estimator=gae", "engine.settings.critic.model.path={model}",
    "engine.settings.critic.ppo_mini_batch_size=8", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.001",
]  # fmt: skip
BYPASS = "engine.settings.algorithm.rollout_correction.bypass_mode=true"
RUNS = {
    "TROLL: transformers, two ranks, a critic and a reference": [
        "region.preset=troll", "engine.ranks_per_node=2", *CRITIC,
    ],
    "Top-K: vLLM at temperature 0.8": [
        "region.preset=dppo-topk-tv", "sampler.kind=vllm", "sampler.temperature=0.8", BYPASS,
    ],
}  # fmt: skip
LOGGED = {
    "troll": {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss", "actor/trustrl/projected_share"},
    "dppo": {"actor/trustrl/divergence_mean", "actor/trustrl/undecided_share"},
}

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


@pytest.fixture(
    scope="module", params=[pytest.param(name, id=name, marks=pytest.mark.xdist_group(name)) for name in RUNS]
)
def run(request, tmp_path_factory):
    """The folder of a run; the model is random and is rewarded for some letters more than for others."""
    settings = RUNS[request.param]
    if "sampler.kind=vllm" in settings and not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set")
    folder = tmp_path_factory.mktemp("verl")
    code, said = trained(folder, settings)
    assert code == 0, said[-6000:]
    return folder / "run"


def trained(folder, settings, **environment):
    """Trains in `folder`/run; returns the exit code and what was said."""
    model = folder / "model"
    save_model(model, tied=True)
    command = [
        sys.executable, "-m", "trustrl.cli", "run", str(ROOT / "recipes/verl-tour.toml"), f"model.name={model}", *SMALL,
        *(one.format(model=model) for one in settings), "--out", str(folder / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            process.kill()  # verl and Ray end with it
    return process.returncode, said


@pytest.mark.xdist_group("stale")
def test_sequences_that_were_scored_with_other_weights_end_the_run_instead_of_leaving_it(tmp_path):
    """In verl an error of an agent loop is logged, and the batch is trained without its sequences."""
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: stale\n  _target_: verl_stale_loop.Stale\n")
    agent = "engine.settings.actor_rollout_ref.rollout.agent"
    settings = [
        "region.preset=dppo-topk-tv",
        f"{agent}.default_agent_loop=stale",
        f"{agent}.agent_loop_config_path={loops}",
    ]
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    code, said = trained(tmp_path, settings, PYTHONPATH=here)
    rows = RunDirectory(tmp_path / "run").rows()
    assert code != 0, f"trained {[row['trustrl/tokens'] for row in rows]} tokens"
    assert rows == []
    log = (tmp_path / "run" / "verl.log").read_text()
    assert "The sampler must score every sequence of a batch" in log
    assert "for a sequence of step" in log


def test_every_step_begins_with_the_policy_that_sampled(run):
    rows = RunDirectory(run).rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["grad_norm"] > 1e-3  # so that later ratios are those of weights that moved
    for row in rows:
        assert row["trustrl/gap_abs_mean"] < 1e-4
        assert abs(row["trustrl/ratio_mean"] - 1) < 1e-4
        assert row["trustrl/kl_k3"] < 1e-4
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
