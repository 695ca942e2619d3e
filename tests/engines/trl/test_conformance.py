"""`trustrl conformance` on TRL's own losses, called by TRL's own trainer."""

import pytest

pytest.importorskip("trl")

import torch

import trustrl
from trustrl.tools.conformance.adapters import adapted, detected, find
from trustrl.tools.conformance.corpus import run
from trustrl.tools.conformance.expectations import ask, healthy

LOSS = "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"


def test_trls_loss_is_known_by_its_parameters():
    assert detected(find(LOSS)) == "trl"


def test_its_gradient_is_ppos_at_its_settings():
    """Against the closed form, with a bound that masks some tokens."""
    batch = healthy()
    found = ask(adapted(find(LOSS), settings={"loss_type": "dapo", "epsilon": 0.01, "epsilon_high": 0.02}), batch)
    ratio = torch.exp(batch.logp.double() - batch.behavior_logp.double())
    positive = batch.advantage > 0
    masked = torch.where(positive, ratio > 1.02, ratio < 0.99)
    expected = torch.where(batch.in_loss & ~masked, -ratio * batch.advantage, 0.0) / batch.num_tokens
    assert 0 < (masked & batch.in_loss).sum() < batch.num_tokens
    torch.testing.assert_close(found.gradient, expected, rtol=1e-5, atol=1e-7)


def test_the_truth_table_holds_and_the_mean_of_grpo_is_the_micro_batchs_own():
    results = {one.case: one for one in run(adapted(find(LOSS), settings={"loss_type": "grpo"}), "ppo")}
    cells = [one for case, one in results.items() if "→ π" in case]
    assert len(cells) == 10
    assert {one.verdict for one in cells} == {"passes"}
    assert results["a batch in two micro-batches"].verdict == "tells"


def test_an_unknown_setting_is_refused():
    with pytest.raises(trustrl.errors.ConfigError, match="field of GRPOConfig, got 'epsilonn'"):
        adapted(find(LOSS), settings={"epsilonn": 0.1})
