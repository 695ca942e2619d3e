"""The tests that slime and miles share. Each test file of theirs imports them and has a fixture `engine`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import trustrl
from support import parity, response_world as world
from support.refusal_examples import SLIME, cases
from trustrl.engines.refusals.slime import ROWS
from trustrl.errors import ConfigError, EngineError, MissingDataError

__all__ = [
    "Engine",
    "test_a_missing_anchor_raises",
    "test_a_preset_has_the_files_verdicts_and_gradient",
    "test_a_region_of_the_vocabulary_is_refused",
    "test_an_average_over_tokens_is_the_engines",
    "test_another_signature_is_refused",
    "test_each_row_refuses_its_example",
    "test_entropy_and_kl_are_the_engines",
    "test_metrics_are_in_the_units_of_the_engines_own",
    "test_ppo_is_the_engines_own_clip",
    "test_the_start_up_check_warns_of_an_idle_region",
]

OWN_CLIP = {"preset": "ppo", "ratio": {"max_increase": 0.2, "max_decrease": 0.2}}
"""PPO with the engine's default bounds."""


@dataclass
class Engine:
    path: str
    """The adapter's module."""
    module: Any
    """The engine's module of losses."""
    dispatch: Callable
    spied: list
    more: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that only this engine reads."""

    def args(self, **given):
        return world.arguments(f"{self.path}.region_loss", **{**self.more, **given})

    def result(self, tokens, data=None, **given):
        return world.result(self.dispatch, self.spied, self.args(**given), tokens, data)

    @property
    def adapter(self):
        return importlib.import_module(self.path)


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_preset_has_the_files_verdicts_and_gradient(engine, name):
    parity.check(name, lambda tokens: engine.result(tokens, trustrl_region=name)[0], parity.sequence_mean)


@pytest.mark.parametrize("name", ["dppo-binary-tv", "minirl"])
def test_an_average_over_tokens_is_the_engines(engine, name):
    """Megatron divides by the number of tokens afterwards, which the engine returns next to the loss."""

    def gradient(tokens):
        found = engine.result(tokens, trustrl_region=name, calculate_per_token_loss=True)[0]
        args = engine.args(trustrl_region=name, calculate_per_token_loss=True)
        _, count, _ = engine.dispatch(args, world.batch(tokens), world.logits(tokens.logp))
        return found / count

    parity.check(name, gradient, parity.token_mean)


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_ppo_is_the_engines_own_clip(engine, anchor):
    """To the logits, with the same anchor on both sides."""
    tokens = parity.read("ppo").batch
    region = OWN_CLIP | {"anchor": anchor}
    _, ours, _ = engine.result(tokens, trustrl_region=region)
    rollout = anchor == "behavior"
    _, theirs, told = engine.result(tokens, loss_type="policy_loss", use_rollout_logprobs=rollout)
    assert 0.05 < told["pg_clipfrac"] / len(tokens.logp) < 0.95
    assert theirs.abs().max() > 0
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-6


def test_entropy_and_kl_are_the_engines(engine):
    tokens = parity.read("ppo").batch
    terms = {"entropy_coef": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.2}
    region = OWN_CLIP | {"anchor": "proximal"}
    _, ours, told = engine.result(tokens, trustrl_region=region, **terms)
    _, theirs, wanted = engine.result(tokens, loss_type="policy_loss", **terms)
    _, without, _ = engine.result(tokens, loss_type="policy_loss")
    assert (theirs - without).abs().max() > 0.01 * theirs.abs().max()
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-6
    for name in ("entropy_loss", "kl_loss"):
        assert told[name] == pytest.approx(wanted[name], rel=1e-6)


def test_metrics_are_in_the_units_of_the_engines_own(engine):
    """The engine adds metrics over micro-batches and divides by the number of rollouts."""
    tokens = parity.read("ppo").batch
    _, _, told = engine.result(tokens, trustrl_region="ppo")
    case = parity.read("ppo")
    decided = tokens.in_loss & (tokens.advantage != 0)
    masked = ((case.factors == 0) & decided).sum() / decided.sum()
    assert told["trustrl/masked_share"] / len(tokens.logp) == pytest.approx(masked.item(), rel=1e-6)
    assert not torch.tensor(list(told.values())).isnan().any()


@pytest.mark.parametrize("case", cases(ROWS, SLIME), ids=lambda case: case.row.setting)
def test_each_row_refuses_its_example(engine, case):
    row = case.row
    tokens = parity.read("ppo").batch
    region = {"preset": case.preset, **case.region}
    given = {key.removeprefix("--").replace("-", "_"): value for key, value in case.settings.items()}
    with pytest.raises(ConfigError) as refused:
        engine.adapter.check_arguments(engine.args(trustrl_region=region, **given))
    assert str(refused.value).startswith(f"{row.setting} must be {row.must_be}")
    assert row.why.split("}")[-1] in str(refused.value)
    engine.result(tokens, trustrl_region=region)  # the example is what was refused


@pytest.mark.parametrize("name", ["dppo-topk-tv", "troll", "dppo-full-kl"])
def test_a_region_of_the_vocabulary_is_refused(engine, name):
    with pytest.raises(ConfigError, match="must read only sampled tokens"):
        engine.adapter.check_arguments(engine.args(trustrl_region=name))


@pytest.mark.parametrize(
    ("missing", "region", "advice"),
    [
        ("rollout_log_probs", "dppo-binary-tv", "must fill `Sample.rollout_log_probs`"),
        ("log_probs", "minirl", "Remove --use-rollout-logprobs"),
    ],
)
def test_a_missing_anchor_raises(engine, missing, region, advice):
    tokens = parity.read("ppo").batch
    data = world.batch(tokens)
    del data[missing]
    with pytest.raises(MissingDataError, match=f"^{missing} must be given .*{advice}"):
        engine.result(tokens, data, trustrl_region=region)


def test_the_start_up_check_warns_of_an_idle_region(engine):
    idle = engine.args(trustrl_region={"preset": "ppo", "anchor": "proximal"}, global_batch_size=8)
    with pytest.warns(trustrl.errors.TrustRLWarning, match="ppo cannot act: .* --num-steps-per-rollout"):
        engine.adapter.check_arguments(idle)


def test_another_signature_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine.module, "policy_loss_function", lambda args, batch, logits: None)
    engine.adapter._check_seams.cache_clear()
    with pytest.raises(EngineError, match=r"policy_loss_function must take .*got \('args', 'batch', 'logits'\)"):
        engine.adapter.check_arguments(engine.args())
