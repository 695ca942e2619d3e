"""The shared file of tensors through TRL's `_compute_loss`; a stub of the forward pass gives it the file's log-probs."""

import inspect

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOTrainer

import trustrl
from support import parity, trl_world as world


@pytest.fixture
def stubbed(monkeypatch):
    """Makes TRL's own forward pass return the log-probs of the list's last tensor."""
    given = []

    def forward(self, *args, **kwargs):
        return given[-1], torch.zeros_like(given[-1].detach()), None  # log-probs, entropies, the experts' loss

    forward.__signature__ = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", forward)
    return given


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_preset_has_the_files_verdicts_and_gradient_with_a_stub_forward(name, stubbed):
    def gradient(tokens):
        stubbed.append(tokens.logp)
        rows, width = tokens.logp.shape
        ids = torch.zeros(rows, width, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :2], "prompt_mask": torch.ones_like(ids[:, :2]),
            "completion_ids": ids, "completion_mask": torch.ones_like(ids), "tool_mask": tokens.in_loss.long(),
            "advantages": tokens.advantage[:, 0], "num_items_in_batch": tokens.in_loss.sum(),
            "old_per_token_logps": tokens.proximal_logp, "sampling_per_token_logps": tokens.behavior_logp,
            "trustrl_version": torch.full((rows, width), -1),
            "trustrl_behavior_logp": tokens.behavior_logp, "trustrl_proximal_logp": tokens.proximal_logp,
        }  # fmt: skip
        trainer = world.ours(trustrl.preset(name), loss_type="grpo")
        loss = trainer._compute_loss(trainer.model, inputs)
        (found,) = torch.autograd.grad(loss, tokens.logp)
        return found

    parity.check(name, gradient, parity.sequence_mean)
