"""Our losses inside SkyRL: registered once, chosen by one setting, and a sentence for what does not go with them."""

import subprocess
import sys

import pytest

pytest.importorskip("skyrl")

from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.workers.worker_utils import reduce_metrics
from skyrl.train.config import AlgorithmConfig, make_config

import trustrl
from support import skyrl_world as world
from trustrl import regions
from trustrl.engines import skyrl as engine
from trustrl.engines.skyrl import losses
from trustrl.errors import ConfigError, DuplicateNameError, EngineError, MissingDataError

# ── registration ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_preset_is_registered():
    assert set(engine.registered()) == {"trustrl", "trustrl-dppo", *(f"trustrl-{name}" for name in trustrl.presets())}
    assert set(engine.registered()) < set(ppo_utils.PolicyLossRegistry.list_available())


def test_registering_twice_is_refused():
    with pytest.raises(DuplicateNameError, match="twice"):
        engine.register()


def test_a_loss_that_somebody_replaced_is_noticed(monkeypatch):
    monkeypatch.setitem(ppo_utils.PolicyLossRegistry._functions, "trustrl-ppo", print)
    with pytest.raises(EngineError, match=r"'trustrl-ppo' must be trustrl's, got <built-in"):
        engine.registered()
    monkeypatch.delitem(ppo_utils.PolicyLossRegistry._functions, "trustrl-ppo")
    with pytest.raises(EngineError, match="got None"):
        engine.registered()


def test_a_skyrl_that_calls_its_losses_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(ppo_utils, "ppo_policy_loss", lambda log_probs, advantages: None)
    with pytest.raises(EngineError, match=r"ppo_policy_loss must take .*got \('log_probs', 'advantages'\)"):
        losses._check_seams()


def test_a_skyrl_that_reduces_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(ppo_utils, "reduce_loss", lambda loss, loss_mask: (loss * loss_mask).mean())
    with pytest.raises(EngineError, match="does not add the tokens"):
        losses._check_seams()


def test_an_old_skyrl_is_refused(monkeypatch):
    monkeypatch.setattr(losses.seam.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(EngineError, match=r"skyrl must be at least 0\.3, got 0\.2\.0"):
        losses._check_seams()


# ── what a run may be asked for ─────────────────────────────────────────────────────────────────────────────────────


def config(*arguments, loss="trustrl-dppo-binary-tv"):
    """As `python -m trustrl.engines.skyrl` makes it from the command line."""
    made = make_config(algorithm_cls=engine.RegionAlgorithmConfig)
    return made.from_cli_overrides([f"trainer.algorithm.policy_loss_type={loss}", *arguments])


def test_settings_arrive_from_skyrls_command_line():
    asked = ["trainer.algorithm.region.divergence.max_increase=0.3", "trainer.algorithm.region.max_ratio=5.0"]
    found = engine.check_settings(config(*asked))
    assert found == regions.DPPO(regions.BinaryTV(max_increase=0.3), max_ratio=5.0)
    assert engine.check_settings(config()) == trustrl.preset("dppo-binary-tv")


def test_a_region_can_be_described_in_full():
    asked = ["trainer.algorithm.region.kind=dppo", "trainer.algorithm.region.divergence.kind=binary-kl"]
    assert engine.check_settings(config(*asked, loss="trustrl")) == regions.DPPO(regions.BinaryKL())


def test_skyrls_own_settings_are_enough_for_a_preset():
    assert engine.region_of("trustrl-ppo", AlgorithmConfig()) == trustrl.preset("ppo")


SAMPLING, ALGORITHM = "generator.sampling_params", "trainer.algorithm"


@pytest.mark.parametrize(
    ("loss", "arguments", "says"),
    [
        ("trustrl-dppo-topk-tv", [], "got 'dppo'. SkyRL keeps only the sampled token's log-prob"),
        ("trustrl-troll", ["trainer.strategy=megatron"], "trainer.strategy must be fsdp"),
        ("trustrl-dppo-full-kl", [], "does not keep the rollout's hidden states"),
        ("trustrl", [], "python -m trustrl.engines.skyrl"),
        ("dppo-binary-tv", [], "Did you mean 'trustrl-dppo-binary-tv'"),
        ("trustrl-ppo", [f"{ALGORITHM}.region.kind=spo"], "policy_loss_type='trustrl'"),
        ("trustrl-gspo", [], f"{ALGORITHM}.loss_reduction must be sequence_mean"),
        (
            "trustrl-ipo",
            [f"{ALGORITHM}.region.log_ratio_penalty=0.1", "trainer.strategy=megatron"],
            "trainer.strategy must be fsdp",
        ),
        ("trustrl-ppo", [f"{ALGORITHM}.eps_clip_high=0.28"], f"{ALGORITHM}.eps_clip_high must be left at 0.2"),
        ("trustrl-dppo-binary-tv", [f"{ALGORITHM}.dppo.delta_low=0.1"], f"{ALGORITHM}.dppo must be left at"),
        ("trustrl-ppo", [f"{ALGORITHM}.off_policy_correction.tis_ratio_type=token"], "takes region.correction"),
        ("trustrl-ppo", [f"{ALGORITHM}.use_tis=true"], "off_policy_correction must be off"),
        ("trustrl-ppo", [f"{SAMPLING}.logprobs=null"], f"{SAMPLING}.logprobs must be 1"),
        ("trustrl-ppo", [f"{SAMPLING}.top_p=0.9"], f"{SAMPLING}.top_p must be 1.0"),
        ("trustrl-ppo", [f"{SAMPLING}.top_k=50"], f"{SAMPLING}.top_k must be -1"),
        ("trustrl-ppo", [f"{SAMPLING}.min_p=0.1"], f"{SAMPLING}.min_p must be 0.0"),
        ("trustrl-ppo", [f"{SAMPLING}.repetition_penalty=1.1"], "repetition_penalty must be 1.0"),
        ("trustrl-ppo", [f"{SAMPLING}.temperature=0.8"], "logprobs_mode must be processed_logprobs"),
        ("trustrl-ppo", [f"{ALGORITHM}.temperature=0.8"], "different temperatures"),
    ],
)
def test_what_does_not_go_with_a_region_is_refused_before_the_start(loss, arguments, says):
    with pytest.raises(ConfigError) as raised:
        engine.check_settings(config(*arguments, loss=loss))
    assert says in str(raised.value)


def test_processed_log_probs_may_have_a_temperature():
    processed = "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs"
    assert engine.check_settings(config(f"{SAMPLING}.temperature=0.8", processed))


def test_a_region_on_the_trainers_policy_does_not_ask_for_the_samplers():
    asked = [f"{SAMPLING}.logprobs=null", f"{ALGORITHM}.region.anchor=proximal"]
    assert engine.check_settings(config(*asked, loss="trustrl-ppo")).anchor == "proximal"


def test_a_fully_asynchronous_trainer_has_no_proximal_policy():
    asynchronous = config(loss="trustrl-minirl")
    asynchronous.trainer.fully_async.enabled = True
    with pytest.raises(ConfigError, match=r"trainer\.fully_async\.enabled must be False"):
        engine.check_settings(asynchronous)
    asynchronous.trainer.algorithm.policy_loss_type = "trustrl-dppo-binary-tv"
    assert engine.check_settings(asynchronous)


# ── what a loss says itself, however the run was started ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        (
            "dppo-binary-tv",
            "rollout_logprobs",
            r"rollout_logprobs must be given with dppo.*sampling_params\.logprobs=1",
        ),
        ("minirl", "rollout_logprobs", "rollout_logprobs must be given"),
        ("minirl", "old_log_probs", "old_log_probs must be given with minirl"),
    ],
)
def test_a_missing_anchor_is_never_replaced_by_the_other(name, missing, says):
    with pytest.raises(MissingDataError, match=says):
        world.result(world.algorithm(f"trustrl-{name}"), world.batch()._replace(**{missing: None}))


def test_the_sampler_is_enough_for_a_region_anchored_on_it():
    found = world.result(world.algorithm("trustrl-dppo-binary-tv"), world.batch()._replace(old_log_probs=None))
    assert found.gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "region", "says"),
    [
        ("troll", None, "must run in trustrl's policy worker, got SkyRL's own"),
        ("gspo", None, "sequence_mean"),
        ("ipo", {"log_ratio_penalty": 0.1}, "must run in trustrl's policy worker, got SkyRL's own"),
    ],
)
def test_a_loss_refuses_what_it_cannot_run(name, region, says):
    with pytest.raises(ConfigError, match=says):
        world.result(world.algorithm(f"trustrl-{name}", region=region), world.batch())


def test_a_batch_without_a_mask_is_all_in_the_loss():
    tokens = world.batch()
    whole = tokens._replace(**{name: getattr(tokens, name).nan_to_num(-1.0, -1.0, -1.0) for name in tokens._fields[:3]})
    found = world.result(world.algorithm("trustrl-pg-is"), whole._replace(loss_mask=None))
    assert found.metrics["trustrl/tokens"] == world.ROWS * world.LENGTH


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["dppo-binary-tv", "minirl", "cispo"])
def test_every_micro_batch_reports_the_same_names_and_skyrl_reduces_them_as_they_are_meant(name):
    """Also one without tokens: SkyRL's ranks reduce name by name, together."""
    tokens = world.batch()
    rows = [slice(0, 1), slice(1, 6), slice(6, 16)]
    parts = [world.result(world.algorithm(f"trustrl-{name}"), world.Batch(*(x[at] for x in tokens))) for at in rows]
    assert {part.metrics.keys() == parts[0].metrics.keys() for part in parts} == {True}
    assert all(isinstance(value, float) for part in parts for value in part.metrics.values())
    reduced = reduce_metrics(
        {key: [part.metrics[key] for part in parts] for key in parts[0].metrics}, sum_loss_metrics=True
    )
    whole = world.result(world.algorithm(f"trustrl-{name}"), tokens).metrics
    assert reduced["trustrl/tokens"] == pytest.approx(whole["trustrl/tokens"] / 3)
    assert reduced["trustrl/ratio_max"] == whole["trustrl/ratio_max"]
    assert not any(key.endswith(("_loss", "_min")) for key in reduced)


# ── the launcher ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("start", ["trustrl.engines.skyrl", "skyrl.train.entrypoints.main_base"])
def test_the_launcher_refuses_before_anything_starts(start):
    """By its own name, and as SkyRL's `override_entrypoint`."""
    run = subprocess.run(
        [
            sys.executable, "-m", start, "trainer.override_entrypoint=trustrl.engines.skyrl",
            "trainer.algorithm.policy_loss_type=trustrl-dppo-binary-tv", "generator.sampling_params.top_p=0.9",
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1
    assert "ConfigError: generator.sampling_params.top_p must be 1.0" in run.stderr


def test_the_launcher_hands_a_checked_configuration_to_skyrl(monkeypatch):
    """SkyRL validates it, starts Ray with it and runs its own entry point."""
    import ray
    from skyrl.train.entrypoints import main_base

    seen = []
    monkeypatch.setattr(
        sys, "argv", ["skyrl", "trainer.algorithm.policy_loss_type=trustrl-ppo", "trainer.logger=console"]
    )
    monkeypatch.setattr("trustrl.engines.skyrl.losses.register", lambda: seen.append("registered"))
    monkeypatch.setattr(main_base, "initialize_ray", lambda cfg: seen.append(cfg.trainer.algorithm.policy_loss_type))
    monkeypatch.setattr(main_base.skyrl_entrypoint, "remote", lambda cfg: seen.append(type(cfg.trainer.algorithm)))
    monkeypatch.setattr(ray, "get", lambda what: what)
    engine.main()
    assert seen == ["registered", "trustrl-ppo", engine.RegionAlgorithmConfig]
