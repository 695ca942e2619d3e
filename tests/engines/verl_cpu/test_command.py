"""`python -m trustrl_verl_cpu`: its defaults in verl's own configuration, and what it refuses before Ray starts."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module

from trustrl.engines.verl import check_settings
from trustrl.errors import ConfigError
from trustrl.runner.verl_cpu_settings import DEFAULTS, PLAIN_PROMPTS
from trustrl.world.verl_dataset import PLAIN_CHAT
from trustrl_verl_cpu import __main__ as command, vllm_server
from trustrl_verl_cpu.__main__ import main
from trustrl_verl_cpu.cpu_defaults import ENVIRONMENT, with_defaults
from trustrl_verl_cpu.replicas import TransformersReplica

REGION = [
    "actor_rollout_ref.rollout.name=transformers_cpu", "algorithm.rollout_correction.bypass_mode=True",
    "actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv",
]  # fmt: skip


def composed(*given):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=with_defaults([*REGION, *given]))


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_verl_knows_every_default_and_a_region_goes_with_them():
    config = composed("trainer.n_gpus_per_node=2")
    check_settings(config)
    assert config.trainer.device == "cpu"
    assert config.ray_kwargs.ray_init.num_gpus == config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    for engine in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert engine.strategy == "fsdp2"
    assert config.ray_kwargs.ray_init.include_dashboard is False


@pytest.mark.parametrize("choice", ["actor_rollout_ref.actor.strategy=megatron", "model_engine=megatron"])
def test_megatron_has_defaults_of_its_own_that_verl_knows(choice):
    config = composed(choice, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    check_settings(config)
    for engine in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        assert (engine.strategy, engine.megatron.dtype, engine.megatron.vanilla_mbridge) == (
            "megatron",
            "float32",
            True,
        )
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    assert config.trainer.device == "cpu"


@pytest.mark.parametrize(
    ("given", "plugins"),
    [
        ([], ["trustrl_verl_cpu.plugin"]),
        (
            ["actor_rollout_ref.actor.strategy=megatron"],
            ["trustrl_verl_cpu.plugin", "trustrl_verl_cpu.megatron_plugin"],
        ),
    ],
)
def test_a_run_loads_megatrons_plugin_only_if_it_trains_on_megatron(given, plugins, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "another")
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "x")  # so that what the command sets goes away with the test
    monkeypatch.setattr(sys, "argv", ["verl_cpu"])
    monkeypatch.setattr(command, "import_module", lambda _: SimpleNamespace(main=lambda: None))
    main(["actor_rollout_ref.rollout.name=transformers_cpu", *given])
    assert os.environ["VERL_USE_EXTERNAL_MODULES"].split(",") == [*plugins, "another"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_user_wins_with_or_without_a_plus(plus):
    given = [f"{plus}ray_kwargs.ray_init.num_gpus=7", "trainer.logger=[file]"]
    complete = with_defaults(given)
    assert complete[-2:] == given
    assert not [one for one in complete[:-2] if "num_gpus=" in one or "trainer.logger" in one]
    assert len(complete) == len(DEFAULTS)


def test_the_user_wins_with_a_whole_group():
    complete = with_defaults(["ray_kwargs.ray_init={num_cpus:4}"])
    assert not [one for one in complete[:-1] if "ray_init" in one]
    assert [one for one in complete if "tensor_model_parallel_size" in one]


@pytest.mark.parametrize(
    ("given", "gone", "value"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_dynamic_bsz", False),
        ("algorithm.filter_groups.enable=True", "trainer.v1.sampler.custom_sampler.path", None),
    ],
)
def test_a_default_gives_way_to_what_it_contradicts(given, gone, value):
    from omegaconf import OmegaConf

    assert OmegaConf.select(composed(), gone) != value
    assert OmegaConf.select(composed(given), gone) == value


def test_plain_prompts_are_a_template_that_hydra_can_read():
    config = composed(PLAIN_PROMPTS)
    assert config.actor_rollout_ref.model.custom_chat_template == PLAIN_CHAT


def test_help_needs_no_framework():
    code = "import sys; from trustrl_verl_cpu.__main__ import main; main(['--help']); print(*sys.modules)"
    run = in_a_new_process(code)
    assert run.stdout.startswith("python -m trustrl_verl_cpu")
    assert not {"verl", "torch", "ray", "transformers"} & set(run.stdout.splitlines()[-1].split())


def test_the_vllm_server_can_be_imported_where_there_is_no_verl():
    code = "import sys; sys.modules['verl'] = None; import trustrl_verl_cpu.vllm_server; print('vllm' in sys.modules)"
    run = in_a_new_process(code)
    assert run.stdout.strip() == "False", run.stderr


def test_the_plugin_leaves_verls_own_choice_of_platform_alone():
    """Without VERL_PLATFORM=cpu a machine without a GPU is what it was to verl."""
    code = "import trustrl_verl_cpu.plugin; from verl.plugin.platform import get_platform; print(get_platform().device_name)"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for platform, device in (("cpu", "cpu"), ("", "cuda")):
        environment["VERL_PLATFORM"] = platform
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
        assert run.stdout.splitlines()[-1] == device, run.stderr


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        pytest.param(
            None, "TRUSTRL_VLLM_PYTHON is not set. It must be the Python of an environment with vLLM", id="not set"
        ),
        pytest.param("/no/such/python", "must be an executable Python, got '/no/such/python'", id="not there"),
        pytest.param(os.path.dirname(sys.executable), "must be an executable Python", id="a folder"),
    ],
)
def test_vllm_without_its_environment_is_refused_before_ray_starts(python, sentence, monkeypatch):
    monkeypatch.delenv(vllm_server.VARIABLE, raising=False)
    if python:
        monkeypatch.setenv(vllm_server.VARIABLE, python)
    with pytest.raises(ConfigError, match=sentence):
        main(["actor_rollout_ref.rollout.name=vllm_cpu"])


def fake_python(folder, answer):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ('{"vllm": false, "trustrl_verl_cpu": true, "trustrl": true, "jaxtyping": true}', "vllm is not installed"),
        ('{"vllm": true, "trustrl_verl_cpu": false}', "trustrl-verl-cpu is not installed .*pip install trustrl-verl-cpu"),
        ('{"vllm": true, "trustrl_verl_cpu": true, "trustrl": true, "jaxtyping": true, "python": "3.9.1", "ray": null}', "must be Python 3.* got 3.9.1"),
        ('{"vllm": true, "trustrl_verl_cpu": true, "trustrl": true, "jaxtyping": true, "python": "HERE", "ray": null}', "ray must be .*got none"),
        ('{"vllm": true, "trustrl_verl_cpu": true, "trustrl": true, "jaxtyping": true, "python": "HERE", "ray": "1.0"}', "ray must be .*got 1.0"),
    ],
)  # fmt: skip
def test_an_environment_that_lacks_something_is_refused(answer, sentence, tmp_path):
    here = ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(ConfigError, match=sentence):
        vllm_server.runtime_env(fake_python(tmp_path, answer.replace("HERE", here)))


def test_both_packages_are_imported_from_their_source(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_server.trustrl, "__file__", str(tmp_path / "one" / "trustrl" / "__init__.py"))
    monkeypatch.setattr(vllm_server, "__file__", str(tmp_path / "other" / "trustrl_verl_cpu" / "vllm_server.py"))
    assert vllm_server.source_root().split(os.pathsep) == [str(tmp_path / "one"), str(tmp_path / "other")]


def test_installed_packages_do_not_bring_verls_along(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(vllm_server.trustrl, "__file__", str(tmp_path / "trustrl" / "__init__.py"))
    monkeypatch.setattr(vllm_server, "__file__", str(tmp_path / "trustrl_verl_cpu" / "vllm_server.py"))
    assert vllm_server.source_root() == ""


def test_the_old_name_warns_and_starts_the_command():
    module = "trustrl.engines.verl_cpu"
    run = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=300)
    assert run.stdout.startswith("python -m trustrl_verl_cpu")
    assert "DeprecationWarning: trustrl.engines.verl_cpu is now the package trustrl_verl_cpu" in run.stderr


def test_the_transformers_sampler_refuses_to_return_its_routing():
    replica = object.__new__(TransformersReplica)
    replica.config = SimpleNamespace(enable_rollout_routing_replay=True)
    with pytest.raises(
        ConfigError, match=r"enable_rollout_routing_replay must be False with rollout.name=transformers_cpu"
    ):
        asyncio.run(replica.launch_servers())
