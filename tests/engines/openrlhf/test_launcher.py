"""`python -m trustrl.engines.openrlhf`: refusals before Ray starts, and the trainer in Ray's workers."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("openrlhf")

import ray

import trustrl
from support import openrlhf_world as world
from support.refusal_examples import OPENRLHF, cases
from trustrl.engines import openrlhf as engine
from trustrl.engines.openrlhf import launcher
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.openrlhf import ROWS
from trustrl.errors import ConfigError, TrustRLWarning

SEVERAL = ["--train.max_epochs", "2"]


def on_command_line(settings):
    lines = []
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        lines += [name, *values]
    return lines


def needed(preset, region):
    level = "token" if "behavior" in trustrl.preset(preset, **region).needs().anchors else "off"
    mode = "seq-mean-token-mean" if preset == "gspo" else "token-mean"
    return {"--algo.advantage.is_correction_level": level, "--actor.loss_agg_mode": mode}


@pytest.mark.parametrize("case", cases(ROWS, OPENRLHF), ids=lambda case: f"{case.row.setting} {case.row.scope.words}")
def test_each_row_of_openrlhfs_table_refuses_its_example(case):
    row, region = case.row, {"preset": case.preset, **case.region}
    working = needed(case.preset, case.region)
    args = world.arguments(*SEVERAL, *on_command_line(working | case.settings))
    others = [one for one in ROWS if one is not row]
    rows.check(others, launcher._arguments(args), trustrl.preset(case.preset, **case.region))
    with pytest.raises(ConfigError) as refused:
        engine.check_settings(args, region)
    assert str(refused.value).startswith(f"{row.setting} must be {row.must_be.split('{')[0]}")
    assert row.why.split("{")[-1].split("}")[-1] in str(refused.value)
    if case.settings:
        engine.check_settings(world.arguments(*SEVERAL, *on_command_line(working)), region)


@pytest.mark.parametrize("region", [None, ""])
def test_a_run_without_a_region_is_refused(region):
    with pytest.raises(ConfigError, match=r"--trustrl\.region must name a region"):
        engine.check_settings(world.arguments(), region)


def test_one_update_per_batch_against_the_trainers_own_log_probs_is_said_to_leave_the_region_nothing_to_do():
    region = {"preset": "ppo", "anchor": "proximal"}
    once = ["--rollout.batch_size", 8, "--train.batch_size", 8]
    with pytest.warns(TrustRLWarning, match=r"ppo cannot act: .* Set --train\.batch_size below"):
        engine.check_settings(world.arguments(*once), region)
    engine.check_settings(world.arguments(*once, *SEVERAL), region)


def test_the_command_refuses_before_it_starts_ray():
    command = [sys.executable, "-m", "trustrl.engines.openrlhf", *world.WORKING, *world.RECORDED]
    refused = subprocess.run([*command, "--actor.dual_clip", "3"], capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0
    assert "ConfigError: --actor.dual_clip must be left out with a region, got 3.0." in refused.stderr
    assert "Started a local Ray instance" not in refused.stderr + refused.stdout


def test_ray_starts_with_the_hook_and_openrlhfs_own_environment():
    seen = {}
    start = launcher._with_hook(lambda **options: seen.update(options), "ppo")
    start(runtime_env={"env_vars": {"NCCL_DEBUG": "WARN"}}, num_cpus=1)
    assert seen == {
        "num_cpus": 1,
        "runtime_env": {
            "worker_process_setup_hook": "trustrl.engines.openrlhf.worker_hook.install",
            "env_vars": {"NCCL_DEBUG": "WARN", "TRUSTRL_REGION": "ppo", "TRUSTRL_MAX_KEPT": "4096"},
        },
    }


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_number_of_kept_ids_below_1_is_refused(value):
    assert [launcher.max_kept_given(one) for one in (None, "", "7")] == [4096, 4096, 7]
    with pytest.raises(ConfigError, match=rf"--trustrl\.max_kept must be a whole number ≥ 1, got '{value}'"):
        launcher.max_kept_given(value)


@pytest.mark.parametrize("setting", [["--rollout.top_p", 0.9], []])
def test_the_samplers_log_probs_are_requested_where_they_are_read(setting):
    region = {"preset": "ppo", "anchor": "proximal", **({} if setting else {"max_staleness": 1})}
    engine.check_settings(world.arguments(*SEVERAL, *setting, *world.RECORDED), region)
    with pytest.raises(ConfigError, match=r"is_correction_level must be token with a region, got 'off'"):
        engine.check_settings(world.arguments(*SEVERAL, *setting), region)


def test_truncated_sampling_has_the_conditions_of_a_region_that_reads_the_vocabulary():
    given = [*SEVERAL, *world.RECORDED, "--ds.zero_stage", 3]
    engine.check_settings(world.arguments(*given), "dppo-binary-tv")
    with pytest.raises(ConfigError, match=r"--ds\.zero_stage must be at most 2"):
        engine.check_settings(world.arguments(*given, "--rollout.top_p", 0.9), "dppo-binary-tv")


IMPORTS = """
import sys
from trustrl.engines.openrlhf import install
install()
install()
assert not {name for name in sys.modules if name.split('.')[0] in ('openrlhf', 'deepspeed', 'torch', 'vllm')}
from importlib.util import find_spec
assert find_spec('openrlhf.trainer.ray.ppo_actor')  # looking is not importing
import FIRST
from openrlhf.trainer.ray import ppo_actor, vllm_engine
from trustrl.engines.openrlhf.rollout_actor import RecordingRolloutActor
from trustrl.engines.openrlhf.trainer import RegionActorPPOTrainer, RegionPolicyModelActor
assert ppo_actor.ActorPPOTrainer is RegionActorPPOTrainer
assert issubclass(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class, RegionPolicyModelActor)
assert issubclass(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class, RecordingRolloutActor)
"""


@pytest.mark.parametrize("first", ["openrlhf.trainer.ray.ppo_actor", "trustrl.engines.openrlhf.trainer"])
def test_the_hook_imports_nothing_until_the_trainer_is_imported(first):
    code = IMPORTS.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@ray.remote
class Worker:
    """A Ray worker that imports OpenRLHF's trainer as `PolicyModelActor` does."""

    def before(self):
        return sorted(name for name in sys.modules if name.split(".")[0] in ("openrlhf", "deepspeed"))

    def trainer(self):
        from openrlhf.trainer.ray import ppo_actor

        return ppo_actor.ActorPPOTrainer.__module__, os.environ["TRUSTRL_REGION"]


def test_a_real_ray_worker_has_the_trainer(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    start = launcher._with_hook(ray.init, "dppo-binary-kl")
    start(num_cpus=1, include_dashboard=False, _temp_dir=str(tmp_path_factory.mktemp("r")))
    try:
        worker = Worker.remote()
        assert ray.get(worker.before.remote()) == []
        assert ray.get(worker.trainer.remote()) == ("trustrl.engines.openrlhf.trainer", "dppo-binary-kl")
    finally:
        ray.shutdown()
