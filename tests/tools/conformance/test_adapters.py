"""How each framework's losses are called: names, counts and settings."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import trustrl
from trustrl.tools.conformance.adapters import adapted
from trustrl.tools.conformance.batches import healthy
from trustrl.tools.conformance.expectations import ask


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
