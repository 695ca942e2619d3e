"""How each framework's losses are called: names, counts and settings."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import trustrl
from trustrl.tools.conformance.adapters import adapted, detected
from trustrl.tools.conformance.expectations import ask, healthy


def skyrls(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """A sum, as SkyRL's losses are, scaled by a setting."""
    assert torch.equal(rollout_logprobs, old_log_probs)
    return -(config.dppo.delta_low * log_probs * advantages * loss_mask).sum(), {"clip_ratio": 0.0}


@pytest.fixture
def skyrl(monkeypatch):
    """Stands for SkyRL's module of settings."""
    for name in ("skyrl", "skyrl.train", "skyrl.train.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def settings():
        return SimpleNamespace(dppo=SimpleNamespace(delta_low=0.2), eps_clip_low=0.2)

    sys.modules["skyrl.train.config"].AlgorithmConfig = settings


def test_skyrls_settings_are_set_field_by_field(skyrl):
    batch = healthy()
    for settings, scale in (({}, 0.2), ({"dppo": {"delta_low": 0.5}}, 0.5)):
        found = ask(adapted(skyrls, None, settings), batch).gradient
        wanted = -scale * batch.advantage * batch.in_loss
        torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)


def test_an_unknown_field_is_refused(skyrl):
    with pytest.raises(trustrl.errors.ConfigError, match="field of SimpleNamespace, got 'delta_lo'"):
        adapted(skyrls, "skyrl", {"dppo": {"delta_lo": 0.5}})


@pytest.mark.parametrize(("name", "package"), [("skyrl", "skyrl"), ("verl", "verl")])
def test_a_framework_that_is_missing_is_named_with_its_command(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(trustrl.errors.MissingPackageError, match=rf"{package}.*pip install"):
        adapted(skyrls, name)


def test_a_plain_loss_is_told_the_whole_batchs_count_only_if_it_asks():
    whole = healthy()
    part = whole.rows(slice(0, 1))
    seen = []

    def told(logp, behavior_logp, advantage, mask, num_tokens):
        seen.append(num_tokens)
        return logp.sum()

    def terms(logp, behavior_logp, advantage, mask):
        return -logp * advantage

    ask(adapted(told), part, whole=whole)
    assert seen == [whole.num_tokens] == [19]
    found = ask(adapted(terms), part, whole=whole).gradient
    torch.testing.assert_close(found, -part.advantage.double() / 19, rtol=1e-6, atol=0)


def ppo(ratio, advantage, mask):
    """The mean over the mask of PPO's clip at 0.2."""
    terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return torch.where(mask, terms, 0.0).sum() / mask.sum()


class FakeModule(torch.nn.Module):
    """A module with OpenRLHF's parameters that divides by the counts it is told."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(
        self,
        log_probs,
        old_log_probs,
        advantages,
        action_mask=None,
        rollout_log_probs=None,
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
    ):
        return -self.scale * (log_probs * advantages * action_mask).sum() / batch_num_tokens, None


class FakePPOLoss(torch.nn.Module):
    """A module with torchtune's parameters."""

    def forward(
        self,
        pi_old_logprobs,
        pi_logprobs,
        advantages,
        phi_old_values,
        phi_values,
        returns,
        padding_masks=None,
        value_padding_masks=None,
    ):
        value_loss = ((phi_values - returns) ** 2).mean() + phi_old_values.sum()
        return ppo(torch.exp(pi_logprobs - pi_old_logprobs), advantages, padding_masks) + value_loss, None


def fake_areal(logprobs, proximal_logprobs, old_logprobs, advantages, eps_clip, loss_mask):
    assert torch.equal(proximal_logprobs, old_logprobs)
    assert eps_clip == 0.2
    return ppo(torch.exp(logprobs - proximal_logprobs), advantages, loss_mask), {}


def fake_rlinf(logprobs, old_logprobs, clip_ratio_low, advantages, loss_mask=None, **kwargs):
    assert clip_ratio_low == 0.2
    return ppo(torch.exp(logprobs - old_logprobs), advantages, loss_mask), {}


def test_fakes_with_each_frameworks_parameters_are_detected_and_called_by_name():
    batch = healthy()
    plain = ask(
        adapted(lambda logp, behavior_logp, advantage, mask: ppo(torch.exp(logp - behavior_logp), advantage, mask)),
        batch,
    )
    for loss, name, settings in (
        (FakePPOLoss, "torchtune", {}),
        (fake_areal, "logprobs", {"eps_clip": 0.2}),
        (fake_rlinf, "logprobs", {"clip_ratio_low": 0.2}),
    ):
        assert detected(loss) == name
        found = ask(adapted(loss, settings=settings), batch)
        assert (found.error, found.value) == ("", pytest.approx(plain.value))
        torch.testing.assert_close(found.gradient, plain.gradient, rtol=1e-6, atol=0)


def test_a_fake_of_openrlhfs_module_is_told_the_whole_batchs_counts():
    whole = healthy()
    part = whole.rows(slice(0, 1))
    assert detected(FakeModule) == "openrlhf"
    found = ask(adapted(FakeModule, settings={"scale": 2.0}), part, whole=whole).gradient
    torch.testing.assert_close(found, -2 * part.advantage.double() / 19, rtol=1e-6, atol=0)
