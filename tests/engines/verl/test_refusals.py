"""What the verl engine refuses of verl's configuration, always with the setting and what to do."""

import copy
import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

verl = pytest.importorskip("verl")

import hydra
import yaml
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import EngineRouterReplayConfig

import trustrl
from trustrl.engines.verl import check_settings
from trustrl.engines.verl.__main__ import check_trl
from trustrl.engines.verl.verl_config import fill_in
from trustrl.errors import ConfigError, EngineError

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = f"{POLICY_LOSS}._target_=trustrl.engines.verl.RegionLossConfig"
RIGHT = [f"{POLICY_LOSS}.loss_mode=trustrl-dppo-binary-tv"]
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
KEPT = [OURS, f"+{POLICY_LOSS}.max_kept=1024"]
PROXIMAL = [OURS, f"{POLICY_LOSS}.loss_mode=trustrl-ppo", f"+{POLICY_LOSS}.region.anchor=proximal"]


@functools.cache
def defaults():
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


def configuration(*overrides):
    """verl's own defaults, changed as on its command line: a key it does not have needs a plus."""
    config = copy.deepcopy(defaults())
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key.removeprefix("+"), yaml.safe_load(value), force_add=key.startswith("+"))
    return config


@pytest.mark.parametrize("more", [[], [BYPASS]], ids=["recomputed", "bypassed"])
@pytest.mark.parametrize("plain", [False, True], ids=["OmegaConf", "a dictionary"])
def test_one_setting_is_all_that_a_region_needs(plain, more):
    """The worker takes μ from the sampler's own record, whichever policy verl calls old."""
    config = configuration(*RIGHT, *more)
    assert check_settings(OmegaConf.to_container(config) if plain else config) == trustrl.preset("dppo-binary-tv")


@functools.cache
def of_engine(engine):
    """verl's own defaults of another engine."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=[f"model_engine={engine}"])


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_verls_router_replay_is_left_as_it_is_set(mode, engine):
    """Checked with verl's own configuration of the engines that replay; running them needs GPUs."""
    config = copy.deepcopy(of_engine(engine))
    replay = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
    rollout = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    for key, value in ((replay, mode), (rollout, mode == "R3"), (f"{POLICY_LOSS}.loss_mode", "trustrl-dppo-binary-tv")):
        assert OmegaConf.select(config, key) is not None, key
        OmegaConf.update(config, key, value)
    before = copy.deepcopy(config)
    changed = fill_in(config)
    assert check_settings(config) == trustrl.preset("dppo-binary-tv")
    for key in (replay, rollout):
        assert OmegaConf.select(config, key) == OmegaConf.select(before, key)
    bypass = "algorithm.rollout_correction.bypass_mode"
    assert bypass not in changed  # R2 replays the routes of verl's own recomputation, which a bypass skips
    made = omega_conf_to_dataclass(config.actor_rollout_ref.actor[engine])
    assert (type(made.router_replay), made.router_replay.mode) == (EngineRouterReplayConfig, mode)


def test_routed_experts_cannot_be_recorded_on_verl():
    config = configuration(*RIGHT, OURS, f"+{POLICY_LOSS}.recording={{folder: records, experts: true}}")
    with pytest.raises(ConfigError, match=r"policy_loss.recording.experts must be False on verl, got True"):
        check_settings(config)


def test_a_region_anchored_on_the_trainer_keeps_verls_correction():
    config = configuration(*PROXIMAL, "algorithm.rollout_correction.rollout_is=token")
    assert check_settings(config).anchor == "proximal"


def test_one_update_per_batch_against_the_trainers_own_log_probs_is_said_to_leave_the_region_nothing_to_do():
    one = f"actor_rollout_ref.actor.ppo_mini_batch_size={configuration().data.train_batch_size}"
    with pytest.warns(
        trustrl.errors.TrustRLWarning, match=r"ppo cannot act: .* Set actor_rollout_ref.actor.ppo_mini_batch_size"
    ):
        check_settings(configuration(*PROXIMAL, one))
    check_settings(configuration(*PROXIMAL, one, "actor_rollout_ref.actor.ppo_epochs=2"))
    check_settings(configuration(*RIGHT, one))  # the sampler's numbers are not the trainer's


def test_gspo_takes_its_own_average():
    mode = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", f"{POLICY_LOSS}.loss_mode=trustrl-gspo"]
    assert check_settings(configuration(*RIGHT, *mode)) == trustrl.preset("gspo")


ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"

TOPK = [f"{POLICY_LOSS}.loss_mode=trustrl-dppo-topk-tv"]
RECORDED = [*TOPK, f"{ROLLOUT}.agent.default_agent_loop=trustrl_single_turn_agent"]
TRUNCATED = [*RECORDED, f"{ROLLOUT}.top_p=0.95", *KEPT]
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"

# name: (overrides, what the message must say)
REFUSED = {
    "verl's own loss": ([f"{POLICY_LOSS}.loss_mode=vanilla"], ["loss_mode must be a region's name", "'vanilla'"]),
    "the old trainer": ([*RIGHT, "trainer.use_v1=False"], ["trainer.use_v1 must be True", "replaces loss_mode"]),
    "no recorded log-probs": (
        [*RIGHT, f"{ROLLOUT}.calculate_log_probs=False"], [f"{ROLLOUT}.calculate_log_probs must be True"]
    ),
    "a mismatch counted twice": (
        [*RIGHT, f"{CORRECTION}.rollout_is=token"], [f"{CORRECTION}.rollout_is must be null", "'token'", "π'/μ"]
    ),
    "rejection that nobody applies": (
        [*RIGHT, BYPASS, f"{CORRECTION}.rollout_rs=token_k1"], [f"{CORRECTION}.rollout_rs must be null", "nothing would be rejected"]
    ),
    "rejection that nobody applies to a proximal anchor": (
        [*PROXIMAL, BYPASS, f"{CORRECTION}.rollout_rs=token_k1"], [f"{CORRECTION}.rollout_rs must be null", "bypass_mode=False"]
    ),
    "a correction that nobody applies": (
        [*PROXIMAL, BYPASS, f"{CORRECTION}.rollout_is=token"],
        [f"{CORRECTION}.rollout_is must be null", "'token'", "nothing would be corrected", "bypass_mode=False"],
    ),
    "raw log-probs": (
        [*RIGHT, f"{ROLLOUT}.logprobs_mode=raw_logprobs"], [f"{ROLLOUT}.logprobs_mode must be processed_logprobs", "Raw"]
    ),
    "raw log-probs by vLLM's own arguments": (
        [*RIGHT, f"+{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs"],
        [f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode must be processed_logprobs", "got 'raw_logprobs'", "Raw log-probs"],
    ),
    "min-p without kept ids": ([*RIGHT, f"+{ROLLOUT}.min_p=0.1"], [f"{POLICY_LOSS}.max_kept must be set"]),
    "kept ids without truncation": (
        [*RIGHT, *KEPT, f"{ROLLOUT}.agent.default_agent_loop=trustrl_single_turn_agent"], [f"{POLICY_LOSS}.max_kept must be null", "agent loop of your own"],
    ),
    "top-p without kept ids": (
        [*RIGHT, f"{ROLLOUT}.top_p=0.95"],
        [f"{POLICY_LOSS}.max_kept must be set", "renormalized"],
    ),
    "top-p and a proximal anchor": ([*PROXIMAL, f"{ROLLOUT}.top_p=0.95"], [f"{POLICY_LOSS}.max_kept must be set"]),
    "top-k without kept ids": ([*RIGHT, f"{ROLLOUT}.top_k=50"], [f"{POLICY_LOSS}.max_kept must be set"]),
    "kept ids without the loop": (
        [*RIGHT, f"{ROLLOUT}.top_k=50", *KEPT],
        [f"{ROLLOUT}.agent.default_agent_loop must be trustrl_single_turn_agent", "kept ids"],
    ),
    "a repetition penalty": ([*RIGHT, f"+{ROLLOUT}.repetition_penalty=1.1"], [f"{ROLLOUT}.repetition_penalty must be 1.0"]),
    "a bound of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio=0.15"], [f"{ACTOR}.clip_ratio must be left at 0.2", "region"]),
    "an upper bound of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio_high=0.28"], [f"{ACTOR}.clip_ratio_high must be left"]),
    "a cap of verl's": ([*RIGHT, f"{ACTOR}.clip_ratio_c=20"], [f"{ACTOR}.clip_ratio_c must be left at 3.0"]),
    "a gate of verl's": ([*RIGHT, f"{ACTOR}.tau_neg=2.0"], [f"{ACTOR}.tau_neg must be left at 1.05"]),
    "gspo averaged over tokens": (
        [*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-gspo"], [f"{ACTOR}.loss_agg_mode must be seq-mean-token-mean", "token-mean"]
    ),
    "a loop that does not record": (
        TOPK, [f"{ROLLOUT}.agent.default_agent_loop must be trustrl_single_turn_agent", "most probable ids", "python -m trustrl.engines.verl"]
    ),
    "a tool loop that does not record": (
        [*TOPK, f"{ROLLOUT}.agent.default_agent_loop=tool_agent"], ["must be trustrl_tool_agent"]
    ),
    "a top-K of TensorRT-LLM": (
        [*RECORDED, f"{ROLLOUT}.name=trtllm"],
        [f"{ROLLOUT}.name must be vllm or sglang", "does not read the ids of TensorRT-LLM", "region on the sampled token"],
    ),
    "kept ids of SGLang without a top_k": (
        [*TRUNCATED, f"{ROLLOUT}.name=sglang"],
        [f"{ROLLOUT}.top_k must be from 1 to 4096", "got -1", "largest number of ids that a token may keep"],
    ),
    "more kept ids than SGLang returns": (
        [*TRUNCATED, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_k=600", f"+{SGLANG}.sampling_mask_max_tokens=512"],
        ["top_k must be from 1 to 512", "got 600", "raise actor_rollout_ref.rollout.engine_kwargs.sglang"],
    ),
    "log-probs that SGLang rounds": (
        [*RIGHT, f"{ROLLOUT}.name=sglang", f"+{SGLANG}.rl_on_policy_target=fsdp"],
        [f"{SGLANG}.rl_on_policy_target must be absent", "bf16"],
    ),
    "log-probs of SGLang from before the temperature": (
        [*RIGHT, f"{ROLLOUT}.name=sglang",
         "+ray_kwargs.ray_init.runtime_env.env_vars.SGLANG_RETURN_ORIGINAL_LOGPROB='1'"],
        ["SGLANG_RETURN_ORIGINAL_LOGPROB must be absent", "before the temperature"],
    ),
    "separate prefill and decode": (
        [*RECORDED, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.disaggregation.enabled=True"],
        [f"{ROLLOUT}.disaggregation.enabled must be False", "do not return ids"],
    ),
    "drafts on a CPU": (
        [*RIGHT, f"{ROLLOUT}.name=vllm_cpu", f"+{ROLLOUT}.engine_kwargs.vllm_cpu.speculative_config={{method: ngram}}"],
        [f"{ROLLOUT}.engine_kwargs.vllm_cpu.speculative_config must be absent", "NaN", "On a GPU"],
    ),
    "fewer ids than the region needs": (
        [*RECORDED, f"{ROLLOUT}.name=vllm", f"{POLICY_LOSS}.loss_mode=trustrl-troll", OURS, f"+{POLICY_LOSS}.region.anchor=behavior"],
        [f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs must be at least 64", "got 20"],
    ),
    "the experimental fully asynchronous trainer": (
        [*RIGHT, "+async_training={partial_rollout: true}"],
        ["async_training must be absent", "legacy trainer", "trainer_mode=separate_async"],
    ),
    "the experimental one-step-off-policy trainer": (
        [*RIGHT, "+rollout={nnodes: 1}"],
        ["rollout must be absent", "one-step-off-policy", "parameter_sync_step=1"],
    ),
    "an engine whose output layer is not read": (
        [*RECORDED, f"{ACTOR}.strategy=torchtitan"], [f"{ACTOR}.strategy must be fsdp2, fsdp, veomni or megatron", "got 'torchtitan'"]
    ),
    "another fused pass": (
        [*RECORDED, "actor_rollout_ref.model.use_fused_kernels=True"], ["use_fused_kernels must be False"]
    ),
    "distillation": ([*RECORDED, "distillation.enabled=True"], ["distillation.enabled must be False"]),
    "the sampler's whole vocabulary": (
        [*RIGHT, f"{POLICY_LOSS}.loss_mode=trustrl-dppo-full-tv"], ["region.anchor must be proximal", "whole distribution"]
    ),
    "an exact divergence under FSDP1": (
        [*PROXIMAL, f"{POLICY_LOSS}.loss_mode=trustrl-dppo-full-tv"], [f"{ACTOR}.strategy must be fsdp2", "'fsdp'"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_a_region_is_refused_in_a_sentence(name):
    overrides, says = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        check_settings(configuration(*overrides))
    for part in says:
        assert part in str(refused.value)
    assert str(refused.value).endswith(".")


def test_what_a_region_needs_is_filled_in_where_nobody_chose():
    config = configuration(*TOPK, f"{ROLLOUT}.name=vllm")
    assert fill_in(config) == {f"{ROLLOUT}.agent.default_agent_loop": "trustrl_single_turn_agent"}
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "trustrl_single_turn_agent"
    assert check_settings(config) == trustrl.preset("dppo-topk-tv")
    assert fill_in(config) == {}
    wide = configuration(*TOPK, OURS, f"+{POLICY_LOSS}.region.divergence.k=32", f"{ROLLOUT}.name=vllm")
    assert fill_in(wide)[f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"] == 32
    assert check_settings(wide).divergence.k == 32
    mine = configuration(*TOPK, f"{ROLLOUT}.agent.default_agent_loop=mine")
    assert fill_in(mine) == {}


def test_a_loop_of_ones_own_may_record_kept_ids_of_its_own_truncation():
    config = configuration(*RIGHT, *KEPT, f"{ROLLOUT}.agent.default_agent_loop=mine")
    assert check_settings(config) == trustrl.preset("dppo-binary-tv")


@pytest.mark.parametrize("truncation", ["top_p=0.9", "top_k=50"])
def test_truncated_sampling_gets_what_records_its_kept_ids(truncation):
    config = configuration(*RIGHT, f"{ROLLOUT}.{truncation}", f"{ROLLOUT}.name=vllm")
    assert fill_in(config) == {
        f"{POLICY_LOSS}.max_kept": 4096,
        f"{POLICY_LOSS}._target_": "trustrl.engines.verl.RegionLossConfig",
        f"{ROLLOUT}.agent.default_agent_loop": "trustrl_single_turn_agent",
        f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs": 4097,
    }
    check_settings(config)


@pytest.mark.parametrize(
    "region",
    [RIGHT, PROXIMAL, [*PROXIMAL, f"{POLICY_LOSS}.loss_mode=trustrl-dppo-topk-tv"]],
    ids=["μ", "π'", "π' top-K"],
)
def test_every_region_gets_the_loop_that_records_versions(region):
    for loop in ("single_turn_agent", "tool_agent"):
        config = configuration(*region, f"{ROLLOUT}.agent.default_agent_loop={loop}")
        check_settings(config)  # without the launcher, a region that needs no top-K runs in verl's own loops
        assert fill_in(config) == {f"{ROLLOUT}.agent.default_agent_loop": f"trustrl_{loop}"}
        check_settings(config)
    assert fill_in(configuration(*region, f"{ROLLOUT}.agent.default_agent_loop=mine")) == {}


@pytest.mark.parametrize(
    "more",
    [[], [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=200"],
     [f"{ROLLOUT}.top_k=600", f"+{SGLANG}.sampling_mask_max_tokens=1024"]],
    ids=["the-whole-vocabulary", "top-p", "a-raised-limit"],
)  # fmt: skip
def test_a_top_k_region_takes_sglang(more):
    config = configuration(*RECORDED, f"{ROLLOUT}.name=sglang", *more)
    fill_in(config)
    assert check_settings(config) == trustrl.preset("dppo-topk-tv")


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_a_region_on_the_sampled_token_takes_other_samplers(name):
    """Their log-prob of the sampled token is in verl's own contract. Settings only."""
    config = configuration(*RIGHT, f"{ROLLOUT}.name={name}")
    fill_in(config)
    assert check_settings(config) == trustrl.preset("dppo-binary-tv")
    check_settings(configuration(*PROXIMAL, f"{POLICY_LOSS}.loss_mode=trustrl-dppo-topk-tv", f"{ROLLOUT}.name={name}"))


def test_drafts_are_allowed_where_they_are_not_broken():
    drafts = f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{method: ngram}}"
    check_settings(configuration(*RIGHT, f"{ROLLOUT}.name=vllm", drafts))


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
@pytest.mark.parametrize("overrides", [RIGHT, RECORDED, [f"{POLICY_LOSS}.loss_mode=trustrl-troll"]])
def test_asynchronous_trainers_run_every_region_that_the_synchronous_one_runs(mode, overrides):
    check_settings(configuration(*overrides, f"trainer.v1.trainer_mode={mode}"))


def test_the_experimental_trainers_are_the_legacy_one_as_their_refusal_says():
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert issubclass(SeparateRayPPOTrainer, RayPPOTrainer)
    for trainer in ("fully_async_policy.fully_async_trainer", "one_step_off_policy.ray_trainer"):
        path = Path(verl.__file__).parent / "experimental" / f"{trainer.replace('.', '/')}.py"
        assert "SeparateRayPPOTrainer)" in path.read_text()
    assert "apply_bypass_mode" in inspect.getsource(SeparateRayPPOTrainer)


def test_verls_own_start_refuses_too_where_the_driver_loads_the_regions(tmp_path):
    """`main_ppo` without the launcher, as its users start it: refused before Ray."""
    run = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", f"hydra.run.dir={tmp_path}", *RECORDED,
         "trainer.use_v1=False"],
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": "trustrl.engines.verl"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1
    assert "trainer.use_v1 must be True" in run.stderr
    assert "ray init" not in run.stdout


def test_verls_own_start_is_left_alone_with_verls_own_losses():
    from verl.utils.config import validate_config

    with pytest.raises(AssertionError, match="real_train_batch_size"):  # verl's own check, and none of ours
        validate_config(configuration(f"{POLICY_LOSS}.loss_mode=vanilla", f"{ROLLOUT}.top_p=0.9", "data.train_batch_size=7",
                                      "trainer.n_gpus_per_node=8", f"{ACTOR}.use_dynamic_bsz=False"), False, False)  # fmt: skip


# ── the launcher: verl's main_ppo, after these checks ───────────────────────────────────────────────────────────────


def test_the_launcher_refuses_before_anything_starts(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "trustrl.engines.verl", f"hydra.run.dir={tmp_path}", *RIGHT, f"{ROLLOUT}.calculate_log_probs=False"],
        env=dict(os.environ), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1
    assert f"{ROLLOUT}.calculate_log_probs must be True" in run.stderr
    assert "ray init" not in run.stdout


def test_the_launcher_starts_verl_with_its_own_configuration(monkeypatch):
    from verl.trainer import main_ppo

    from trustrl.engines.verl import __main__ as launcher

    started = []
    monkeypatch.setenv(launcher.VARIABLE, "their.module")
    monkeypatch.setenv("TRUSTRL_VOCAB_IMPL", "chunked")
    monkeypatch.setenv("TRUSTRL_LOSS_IMPL", "eager")
    monkeypatch.setattr(main_ppo, "main", started.append)
    config = configuration(*RIGHT)
    launcher.main(config)
    (given,) = started
    assert os.environ[launcher.VARIABLE] == "their.module,trustrl.engines.verl"
    assert given.ray_kwargs.ray_init.runtime_env.env_vars[launcher.VARIABLE] == os.environ[launcher.VARIABLE]
    assert given.ray_kwargs.ray_init.runtime_env.env_vars["TRUSTRL_VOCAB_IMPL"] == "chunked"
    assert given.ray_kwargs.ray_init.runtime_env.env_vars["TRUSTRL_LOSS_IMPL"] == "eager"
    loop = f"{ROLLOUT}.agent.default_agent_loop=trustrl_single_turn_agent"
    assert given.actor_rollout_ref == configuration(*RIGHT, loop).actor_rollout_ref
    launcher.main(config)
    assert os.environ[launcher.VARIABLE] == "their.module,trustrl.engines.verl"


@pytest.mark.parametrize(("place", "starts"), [("experimental/ppo", True), ("models", False)])
def test_a_trl_that_verls_workers_cannot_import_is_refused_before_ray_starts(place, starts, tmp_path, monkeypatch):
    """TRL 1.16 has no value head any more, and verl 0.9.1 imports it in each FSDP worker where TRL is installed."""
    (tmp_path / "trl" / place).mkdir(parents=True)
    (tmp_path / "trl/__init__.py").touch()
    (tmp_path / "trl-1.16.0.dist-info").mkdir()
    (tmp_path / "trl-1.16.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    if starts:
        check_trl()
    else:
        with pytest.raises(EngineError, match=r"got TRL 1\.16\.0, which verl's workers fail to import\. Uninstall trl"):
            check_trl()
