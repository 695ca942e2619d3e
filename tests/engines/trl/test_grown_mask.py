"""A mask that gains tokens after the rollout was recorded raises: the region would not see them."""

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from trustrl.engines.trl import TrustRegionMixin
from trustrl.errors import EngineError

REGIONS = ["dppo-binary-tv", "dppo-topk-tv"]
CUT = 3
"""Tokens at the end of each completion that are first left out."""


def message(tokens):
    return (
        rf"must not gain tokens after the rollout is recorded, got {tokens} .*class Mine\(TrustRegionMixin, MyTrainer"
    )


def trainer_and_inputs(name="dppo-binary-tv", **more):
    model = world.tiny_model()
    return world.ours(trustrl.preset(name), model), world.batch(model, **more)


@pytest.mark.parametrize("name", REGIONS)
def test_a_mask_with_more_tokens_than_the_record_raises_at_the_end_of_the_step(name):
    trainer, inputs = trainer_and_inputs(name)
    padding = int((inputs["completion_mask"] == 0).sum())
    assert padding == 20
    with pytest.raises(EngineError, match=message(padding)):
        trainer._compute_loss(trainer.model, inputs | {"completion_mask": torch.ones_like(inputs["completion_mask"])})


def test_tool_results_that_join_the_loss_raise():
    trainer, inputs = trainer_and_inputs(tools=True)
    results = int((inputs["tool_mask"] == 0).sum())
    with pytest.raises(EngineError, match=message(results)):
        trainer._compute_loss(trainer.model, inputs | {"tool_mask": torch.ones_like(inputs["tool_mask"])})


def test_as_many_tokens_at_other_places_raise():
    trainer, inputs = trainer_and_inputs()
    inputs["completion_mask"] = inputs["completion_mask"].roll(1, dims=0)
    with pytest.raises(EngineError, match=message(13)):
        trainer._compute_loss(trainer.model, inputs)


def test_a_smaller_mask_is_the_smaller_loss():
    trainer, inputs = trainer_and_inputs()
    inputs["completion_mask"] = inputs["completion_mask"].clone()
    inputs["completion_mask"][1] = 0
    assert world.result(trainer, inputs).metrics["trustrl/tokens"] == inputs["completion_mask"].sum()


def test_an_early_micro_batch_raises_when_its_step_ends():
    model = world.tiny_model()
    trainer = world.ours(trustrl.preset("dppo-binary-tv"), model, gradient_accumulation_steps=2)
    inputs = world.batch(model)
    grown = inputs | {"completion_mask": torch.ones_like(inputs["completion_mask"])}
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    trainer._compute_loss(trainer.model, grown)
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    with pytest.raises(EngineError, match=message(20)):
        trainer._compute_loss(trainer.model, inputs)


class Cuts(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["completion_mask"] = torch.ones_like(rollout["completion_mask"])
        rollout["completion_mask"][:, -CUT:] = 0
        return rollout


class Restores:
    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        return rollout | {"completion_mask": torch.ones_like(rollout["completion_mask"])}


def trainer_of(*bases):
    args = world.settings(max_steps=1, num_iterations=1, logging_steps=1)
    ours = {"region": trustrl.preset("dppo-binary-tv"), "behavior": "trainer", "metrics": "all"}
    return world.trainer_of(type("Mine", bases, {}), world.tiny_model(), args, **ours)


@pytest.mark.filterwarnings("ignore:dppo:trustrl.errors.TrustRLWarning")
def test_a_subclass_in_front_of_the_mixin_is_told_to_move_behind_it_and_trains_there():
    front = trainer_of(Restores, TrustRegionMixin, Cuts)
    with pytest.raises(EngineError, match=message(6 * CUT)):
        front.train()
    assert front.state.global_step == 0
    behind = trainer_of(TrustRegionMixin, Restores, Cuts)
    behind.train()
    assert behind.state.log_history[0]["trustrl/tokens"] == 6 * world.COMPLETION
