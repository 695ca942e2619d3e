"""The loss that engines of sampled tokens share: the parity file, missing anchors, and regions that need more."""

import json

import pytest
import torch

import trustrl
from support import parity
from trustrl import regions
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.errors import ConfigError, MissingDataError, UnknownNameError

SEAM = SampledLoss(
    "Example", {"behavior": ("rollout_logps", "Record them."), "proximal": ("old_logps", "Set recompute=True.")}
)


def rollout(batch, **changes):
    fields = batch._asdict() | changes
    fields.pop("logp")
    return trustrl.RolloutTokens(**fields)


def test_the_file_is_the_oracles():
    assert json.loads(parity.FILE.read_text()) == json.loads(json.dumps(parity.contents()))


@pytest.mark.parametrize("name", parity.PRESETS)
def test_some_tokens_are_stopped_and_some_are_not(name):
    case = parity.read(name)
    at = case.batch.in_loss & (case.batch.advantage != 0)
    stopped = (case.factors == 0)[at].double().mean().item()
    weighted = name in ("cispo", "sapo", "spo", "drpo", "pg-is", "vespo")
    assert stopped == 0 if weighted else 0.01 < stopped < 0.95


@pytest.mark.parametrize("name", parity.PRESETS)
def test_the_shared_loss_is_the_oracles(name):
    average = parity.sequence_mean if name in parity.PER_SEQUENCE else parity.token_mean

    def gradient(batch):
        weights = token_weights(lambda x: (x * average(batch.in_loss)).sum(), batch.logp.detach())
        kind = trustrl.SequenceMeanTokenMean if name in parity.PER_SEQUENCE else trustrl.TokenMean
        reduction = trustrl.TokenWeights(weights, like=kind)
        SEAM(batch.logp, rollout(batch), trustrl.preset(name), reduction).loss.backward()
        return batch.logp.grad

    parity.check(name, gradient, average)


def test_a_wrong_gradient_or_verdict_is_noticed():
    def gradient(scale, stop):
        def found(batch):
            case = parity.read("dppo-binary-tv")
            factors = case.factors.clone()
            if stop:
                factors[factors.nonzero()[0].unbind()] = 0
            return -scale * factors * batch.advantage * parity.token_mean(batch.in_loss)

        return found

    parity.check("dppo-binary-tv", gradient(1, stop=False), parity.token_mean)
    for scale, stop in ((1 + 1e-5, False), (1, True)):
        with pytest.raises(AssertionError, match="dppo-binary-tv"):
            parity.check("dppo-binary-tv", gradient(scale, stop=stop), parity.token_mean)


@pytest.mark.parametrize(("anchor", "said"), [("behavior", "rollout_logps must be given.*Record them"), ("proximal", "old_logps must be given.*Set recompute=True")])  # fmt: skip
def test_a_missing_anchor_is_named_as_the_engine_names_it(anchor, said):
    batch = parity.read("minirl").batch
    reduction = trustrl.TokenWeights(torch.ones(batch.logp.shape))
    with pytest.raises(MissingDataError, match=said):
        SEAM(batch.logp, rollout(batch, **{f"{anchor}_logp": None}), trustrl.preset("minirl"), reduction)


def test_regions_that_the_engine_cannot_feed_are_refused():
    with pytest.raises(ConfigError, match="only sampled tokens in Example, got dppo, which needs the 20 most probable"):
        SEAM.check(trustrl.preset("dppo-topk-tv"))
    with pytest.raises(ConfigError, match="got score-centering, which needs the 128 most probable"):
        SEAM.check(trustrl.preset("score-centering"))
    one = SampledLoss("Example", {"behavior": ("rollout_logps", "Record them.")})
    one.check(trustrl.preset("dppo-binary-tv"))
    with pytest.raises(ConfigError, match=r"must not read the proximal log-probs in Example.*passes only behavior"):
        one.check(trustrl.preset("minirl"))


@pytest.mark.parametrize(
    "given",
    [
        {"preset": "dppo-binary-tv", "max_ratio": 5.0},
        '{"preset": "dppo-binary-tv", "max_ratio": 5.0}',
        trustrl.config_to_dict(trustrl.preset("dppo-binary-tv", max_ratio=5.0)),
    ],
)
def test_one_setting_describes_a_region(given):
    assert region_given(given, "loss.region") == trustrl.preset("dppo-binary-tv", max_ratio=5.0)
    assert region_given("ppo", "loss.region") == trustrl.preset("ppo")


def test_a_setting_that_describes_no_region_is_refused():
    with pytest.raises(UnknownNameError, match="dppo-binary-tv"):
        region_given("dppo-binary-tw", "loss.region")
    for given, said in [
        (3, "loss.region must be a preset's name, or a dictionary"),
        ({"max_ratio": 5.0}, "with `preset` or `kind`"),
        ("{preset", "valid JSON"),
        (trustrl.config_to_dict(regions.BinaryTV(max_increase=0.1)), "must describe a region"),
    ]:
        with pytest.raises(ConfigError, match=said):
            region_given(given, "loss.region")
