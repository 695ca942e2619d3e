"""The same region on the same batch through TRL: every token gets the verdict that the other engines give it."""

import pytest

pytest.importorskip("trl")

import torch

from support import regions_oracle as oracle, trl_world as world


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


def test_there_is_something_to_agree_on():
    import json

    agreed = json.loads(oracle.AGREED.read_text())
    assert agreed.keys() == set(oracle.AGREEING)
    for name in ("binary on μ", "top-K on μ", "top-K KL on μ", "both anchors"):
        assert 0 < agreed[name]["keep"].count("0") < len(agreed[name]["keep"])


# Exact divergences are recorded as hidden states, which a batch made by hand does not have; test_parity has them.
@pytest.mark.parametrize("name", [name for name in oracle.AGREEING if not oracle.CASES[name].region.needs().full])
def test_trl_reaches_the_agreed_verdicts(name, model, monkeypatch):
    case, batch = oracle.CASES[name], oracle.batch(model, 0)
    top = oracle.expected(model, 1, case).topk
    trainer = world.ours(case.region, oracle.model_of(model, oracle.GROWTH), temperature=oracle.TEMPERATURE)
    inputs = {
        "prompt_ids": batch.prompts, "prompt_mask": torch.ones_like(batch.prompts),
        "completion_ids": batch.responses, "completion_mask": batch.in_sequence.int(),
        "tool_mask": (batch.in_loss | ~batch.in_sequence).int(), "advantages": batch.advantages[:, 0],
        "num_items_in_batch": batch.in_loss.sum(), "trustrl_version": torch.full_like(batch.in_loss, -1, dtype=torch.long),
        "trustrl_behavior_logp": batch.behavior_logp, "trustrl_proximal_logp": batch.proximal_logp,
    }  # fmt: skip
    if top is not None:
        inputs |= {"trustrl_topk_ids": top.ids.int(), "trustrl_topk_logp": top.logp}
        if top.tail_logp is not None:
            inputs["trustrl_topk_tail_logp"] = top.tail_logp
    seen = world.spy(monkeypatch)
    trainer._compute_loss(trainer.model, inputs)
    ((out, _, rollout),) = seen
    oracle.check_agreement(
        name, out.decision.keep[rollout.in_loss].tolist(), out.decision.weight[rollout.in_loss].tolist()
    )
