"""Top-K and TROLL through axolotl's own trainer class, against plain models and whole log-softmaxes."""

import pytest

pytest.importorskip("axolotl")

import torch

from support import axolotl_world as world, regions_oracle as oracle
from trustrl.engines.axolotl import TrustRegionTrainer

LARGEST_ERROR = 1e-5
NAMES = [name for name in oracle.AGREEING if oracle.CASES[name].region.needs().topk]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", NAMES)
def test_axolotls_trainer_has_the_gradient_of_whole_log_softmaxes(name, model, tmp_path):
    case, batch = oracle.CASES[name], oracle.batch(model, 0)
    wanted = oracle.expected(model, 1, case)
    trainer = world.trainer(
        TrustRegionTrainer, tmp_path, region=case.region, behavior="trainer", startup_checks=False,
        model=oracle.model_of(model, oracle.GROWTH), temperature=oracle.TEMPERATURE,
    )  # fmt: skip
    inputs = {
        "prompt_ids": batch.prompts, "prompt_mask": torch.ones_like(batch.prompts),
        "completion_ids": batch.responses, "completion_mask": batch.in_sequence.int(),
        "tool_mask": (batch.in_loss | ~batch.in_sequence).int(), "advantages": batch.advantages[:, 0],
        "num_items_in_batch": batch.in_loss.sum(),
        "trustrl_version": torch.full_like(batch.in_loss, -1, dtype=torch.long),
        "trustrl_behavior_logp": batch.behavior_logp, "trustrl_proximal_logp": batch.proximal_logp,
        "trustrl_topk_ids": wanted.topk.ids.int(), "trustrl_topk_logp": wanted.topk.logp,
    }  # fmt: skip
    if wanted.topk.tail_logp is not None:
        inputs["trustrl_topk_tail_logp"] = wanted.topk.tail_logp
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.loss, rel=0, abs=1e-6)
    largest = max(gradient.abs().max() for gradient in wanted.by_name.values())
    for key, p in trainer.model.named_parameters():
        assert (p.grad - wanted.by_name[key]).abs().max() / largest <= LARGEST_ERROR, key
