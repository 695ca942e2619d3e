"""verl's synthetic padding samples, made by verl's own function: they weigh nothing and count nothing."""

import pytest

pytest.importorskip("verl")

import torch
from tensordict import TensorDict
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

import trustrl
from support import regions_oracle as oracle, verl_world as world
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl import anchors
from trustrl.engines.verl.response_layout import places
from trustrl.errors import EngineError

NEEDS = trustrl.preset("dppo-topk-tv").needs()


def sample(prompt, response, rows=None):
    ids = torch.arange(prompt + response)
    rows = response if rows is None else rows
    return {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "input_ids": ids,
        "position_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(response, dtype=torch.long),
        "rollout_log_probs": torch.full((response,), -1.0),
        "teacher_ids": torch.arange(NEEDS.topk, dtype=torch.int32).repeat(rows, 1),
        "teacher_logprobs": torch.full((rows, NEEDS.topk), -3.5),
    }


def micro_batch(*samples):
    keys = sample(1, 1)
    nested = {key: torch.nested.as_nested_tensor([one[key] for one in samples], layout=torch.jagged) for key in keys}
    return TensorDict(nested, batch_size=[len(samples)])


PADDING, _ = construct_minimal_padding_template(sample(10, 40), {}, 2)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([sample(10, 40), PADDING], id="beside a short response"),
        pytest.param([PADDING, sample(10, 200)], id="beside one longer than its rows"),
        pytest.param([PADDING, PADDING], id="alone"),
    ],
)
def test_a_padding_sample_brings_no_row_of_the_samplers_distribution(samples):
    data = micro_batch(*samples)
    found = anchors.topk(NEEDS, data, places(data).tokens)
    real = [one for one in samples if one["response_mask"].any()]
    assert found.ids.tolist() == [row for one in real for row in one["teacher_ids"].tolist()]
    assert found.logp.tolist() == [row for one in real for row in one["teacher_logprobs"].tolist()]


@pytest.mark.parametrize("rows", [3, 6])
def test_a_sequence_in_the_loss_with_another_number_of_rows_is_refused(rows):
    data = micro_batch(sample(4, 5), sample(4, 5, rows))
    data["rollout_log_probs"] = torch.nested.as_nested_tensor([torch.zeros(5)] * 2, layout=torch.jagged)
    with pytest.raises(EngineError, match=f"got {rows} rows for 5 tokens"):
        anchors.check(NEEDS, data)


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")
def test_a_worker_trains_on_padded_batches_as_if_the_padding_were_not_there(tmp_path):
    model = oracle.tiny_model(tmp_path / "model")
    on_ranks("verl_padding.py", 1, model, tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=False)
    assert found.keys() == oracle.CASES.keys()
    for name, runs in found.items():
        plain, padded = runs["plain"], runs["padded"]
        assert world.error(padded["gradient"], plain["gradient"]) <= 1e-5, name
        assert plain["gradient"].norm() > 0
        assert padded["keep"] == plain["keep"], name
        ours = {key: value for key, value in plain["metrics"].items() if "trustrl/" in key}
        for key in ("trustrl/tokens", "trustrl/masked_share", "trustrl/dropped_share"):
            assert padded["metrics"][key] == ours[key], (name, key)
        for key, value in ours.items():
            assert padded["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)
