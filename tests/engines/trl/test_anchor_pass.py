"""The trainer's anchor costs no pass that TRL makes anyway, and training stays the same."""

import functools

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from trustrl import regions
from trustrl.engines.trl import anchors

REGIONS = {
    "binary": trustrl.preset("dppo-binary-tv", anchor="proximal"),
    "top-K": regions.DPPO(regions.TopKTV(max_increase=0.05, max_decrease=0.05, k=20), anchor="proximal"),
    "TROLL": trustrl.preset("troll", k=20),
    "exact TV": regions.DPPO(regions.FullTV(max_increase=0.05, max_decrease=0.05), anchor="proximal"),
}
ROWS, ROLLOUTS = 6, 2


def train(region, updates, monkeypatch):
    """Trains on two rollouts, each used for so many updates. Returns weights, losses and the sequences of each pass."""
    passed = {True: 0, False: 0}
    score = GRPOTrainer._get_per_token_logps_and_entropies

    @functools.wraps(score)
    def counting(self, model, input_ids, *args, **kwargs):
        passed[torch.is_grad_enabled()] += len(input_ids)
        return score(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    trainer = world.ours(
        region, world.tiny_model(), given={"metrics": "all"}, steps_per_generation=updates, logging_steps=1,
        max_steps=updates * ROLLOUTS, learning_rate=1e-3,
    )  # fmt: skip
    trainer.train()
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", score)
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return weights, logs, passed


@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore::trustrl.errors.TrustRLWarning")
def test_training_is_the_same_with_fewer_passes(name, updates, monkeypatch):
    weights, logs, passed = train(REGIONS[name], updates, monkeypatch)
    monkeypatch.setattr(anchors.AnchorRecorder, "shares_trls_pass", False)
    wanted, wanted_logs, separate = train(REGIONS[name], updates, monkeypatch)
    assert (weights - wanted).abs().max() <= 1e-5
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in wanted_logs], abs=1e-5)
    for key in ("trustrl/masked_share", "trustrl/ratio_max", "trustrl/tokens"):
        assert [log[key] for log in logs] == pytest.approx([log[key] for log in wanted_logs], rel=1e-4, abs=1e-5)
    assert passed[True] == separate[True] == ROWS * updates * ROLLOUTS
    trls, distribution = (updates > 1), name != "binary"
    assert separate[False] == ROWS * updates * ROLLOUTS * (distribution + trls if updates > 1 else 1)
    assert passed[False] == ROWS * updates * ROLLOUTS


@pytest.mark.parametrize("name", REGIONS)
def test_later_updates_are_measured_from_the_rollouts_weights(name, monkeypatch):
    _, logs, _ = train(REGIONS[name], 4, monkeypatch)
    assert logs[0]["trustrl/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert all(log["trustrl/ratio_max"] > 1.01 for log in logs[1:4])
