"""Regions in RLinf's own registry, called through its `policy_loss` with its workers' arguments."""

import pytest
import torch

import trustrl
from support import parity
from trustrl.errors import ConfigError, DuplicateNameError, MissingDataError

registry = pytest.importorskip("rlinf.algorithms.registry")
rlinf_utils = pytest.importorskip("rlinf.utils.utils")
omegaconf = pytest.importorskip("omegaconf")
from rlinf.scheduler.cluster.utils import load_user_extension_module

from trustrl.engines import rlinf

ONE_ANCHOR = [name for name in parity.PRESETS if len(trustrl.preset(name).needs().anchors) == 1]
MODES = {
    "token-mean": parity.token_mean,
    "seq-mean-token-mean": parity.sequence_mean,
    "seq-mean-token-sum": lambda mask: mask.double() / len(mask),
}


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    """Loads trustrl as RLinf's workers do: from the environment variable, in a registry without it."""
    for name in [name for name in registry.LOSS_REGISTRY if name.startswith("trustrl")]:
        monkeypatch.delitem(registry.LOSS_REGISTRY, name)
    monkeypatch.setenv("RLINF_EXT_MODULE", "trustrl.engines.rlinf")
    monkeypatch.setenv("TRUSTRL_RLINF_REGION", '{"preset": "ppo", "dual_clip": 3.0}')
    load_user_extension_module()
    yield
    for name in [name for name in registry.LOSS_REGISTRY if name.startswith("trustrl")]:
        del registry.LOSS_REGISTRY[name]


def call(loss_type, batch, mode="token-mean", **changes):
    """RLinf's `policy_loss` with the arguments of its FSDP and Megatron workers for reasoning tasks."""
    given = {
        "task_type": "reasoning", "loss_type": loss_type, "loss_agg_func": rlinf_utils.get_loss_agg_func(mode),
        "logprobs": batch.logp, "old_logprobs": batch.behavior_logp, "advantages": batch.advantage,
        "clip_ratio_c": 3.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_mask": batch.in_loss,
        "clip_log_ratio_min": None, "clip_log_ratio_max": None, "fast_path_zero_loss_mask": True,
    }  # fmt: skip
    return registry.policy_loss(**(given | changes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ONE_ANCHOR)
def test_a_region_has_the_oracles_verdicts_and_gradient(name, mode):
    def gradient(batch):
        loss, metrics = call(f"trustrl-{name}", batch, mode)
        loss.backward()
        stacked = {key: torch.mean(torch.stack([value, value])) for key, value in metrics.items()}  # as its worker does
        assert {"actor/ratio", "actor/policy_loss", "trustrl/masked_share"} <= stacked.keys()
        return batch.logp.grad

    if name in parity.PER_SEQUENCE and mode != "seq-mean-token-mean":
        with pytest.raises(ConfigError, match=f"reduction must be SequenceMeanTokenMean with {name}"):
            gradient(parity.read(name).batch)
        return
    parity.check(name, gradient, MODES[mode])


def test_the_region_of_the_environment_variable_is_rlinfs_own_clip_with_dual_clip():
    gradients = []
    for loss_type in ("actor", "trustrl"):
        batch = parity.read("ppo").batch
        batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
        call(loss_type, batch)[0].backward()
        gradients.append(batch.logp.grad)
    scale = gradients[0].abs().max()
    assert scale > 0
    assert (gradients[0] - gradients[1]).abs().max() / scale < 1e-6


def test_a_region_anchored_on_recomputed_log_probs_reads_the_same_argument():
    rlinf.register_region("trustrl-mine", trustrl.preset("ppo", anchor="proximal"))
    batch = parity.read("ppo").batch
    batch = batch._replace(logp=batch.logp.clone().requires_grad_(True))
    call("trustrl-mine", batch)[0].backward()
    wanted = -parity.read("ppo").factors * batch.advantage * parity.token_mean(batch.in_loss)
    torch.testing.assert_close(batch.logp.grad.double(), wanted, atol=1e-7, rtol=1e-6)


def test_a_micro_batch_without_tokens_has_a_loss_of_zero():
    batch = parity.read("ppo").batch
    logp = batch.logp.clone().requires_grad_(True)
    loss, metrics = call("trustrl-ppo", batch, logprobs=logp, loss_mask=torch.zeros_like(batch.in_loss))
    loss.backward()
    assert loss == 0
    assert not logp.grad.any()
    assert metrics["actor/ratio"] == 0


@pytest.mark.parametrize("name", sorted(set(trustrl.presets()) - set(ONE_ANCHOR)))
def test_a_preset_that_rlinf_cannot_feed_is_not_registered(name):
    assert f"trustrl-{name}" not in registry.LOSS_REGISTRY
    with pytest.raises(ConfigError, match=r"must read (one anchor|only sampled tokens) in RLinf"):
        rlinf.register_region("trustrl-more", trustrl.preset(name))


def test_arguments_that_bypass_the_region_are_refused():
    batch = parity.read("ppo").batch
    with pytest.raises(ConfigError, match=r"algorithm\.clip_log_ratio_max must be None, got 2\.0"):
        call("trustrl-ppo", batch, clip_log_ratio_max=2.0)
    with pytest.raises(MissingDataError, match=r"old_logprobs must be given with ppo, got None\. Set rollout\.return"):
        call("trustrl-ppo", batch, old_logprobs=None)
    with pytest.raises(ConfigError, match=r"runner\.task_type must not be embodied"):
        registry.get_policy_loss("trustrl-ppo")(
            task_type="embodied", logprobs=batch.logp, old_logprobs=batch.behavior_logp, advantages=batch.advantage,
            loss_agg_func=rlinf_utils.masked_mean,
        )  # fmt: skip
    with pytest.raises(DuplicateNameError, match="'trustrl-ppo' is already registered"):
        rlinf.register_region("trustrl-ppo", trustrl.preset("ppo"))
    with pytest.raises(ConfigError, match="must be in lowercase"):
        rlinf.register_region("Trustrl-PPO", trustrl.preset("ppo"))


def settings(*changes):
    base = {
        "runner": {"task_type": "reasoning"},
        "rollout": {"return_logprobs": True},
        "algorithm": {
            "loss_type": "trustrl-dppo-binary-tv", "recompute_logprobs": False, "importance_sampling_fix": False,
            "loss_agg_func": "token-mean", "early_stop_imp_ratio": None,
            "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": 1000000, "repetition_penalty": 1.0},
        },
    }  # fmt: skip
    return omegaconf.OmegaConf.merge(base, omegaconf.OmegaConf.from_dotlist(list(changes)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.importance_sampling_fix=true", "importance_sampling_fix must be None, got True"),
        ("algorithm.recompute_logprobs=true", "recompute_logprobs must be False, got True"),
        ("rollout.return_logprobs=false", r"return_logprobs must be True, got False"),
        ("algorithm.early_stop_imp_ratio=5.0", "early_stop_imp_ratio must be None, got 5.0"),
        ("algorithm.clip_log_ratio_min=-2.0", "clip_log_ratio_min must be None"),
        ("algorithm.sampling_params.top_p=0.9", r"sampling_params\.top_p must be 1\.0, got 0\.9"),
        ("algorithm.sampling_params.top_k=20", r"sampling_params\.top_k must be -1, got 20"),
        ("rollout.sampling_params.repetition_penalty=1.1", r"rollout\.sampling_params\.repetition_penalty"),
        ("runner.task_type=embodied", r"runner\.task_type"),
        ("algorithm.loss_type=trustrl-gspo", "loss_agg_func must be seq-mean-token-mean, got token-mean"),
        ("algorithm.loss_type=actor", "loss_type must name a region, got 'actor'"),
    ],
)
def test_settings_that_remove_the_anchor_or_count_twice_are_refused(change, message):
    assert rlinf.check_settings(settings()) == trustrl.preset("dppo-binary-tv")
    with pytest.raises(ConfigError, match=message):
        rlinf.check_settings(settings(change))
