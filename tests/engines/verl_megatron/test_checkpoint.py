"""verl's Megatron checkpoints on a CPU: a worker that loads one makes the updates of the worker that saved it."""

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

import torch

from support.tiny_models import save_model, some_sequences
from support.verl_launch import ON_MEGATRON, on_ranks

SETUPS = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "expert parallel, two parts of the data": {"expert_model_parallel_size": 2},
}


@pytest.mark.parametrize(
    "setup", ["tensor parallel", pytest.param("expert parallel, two parts of the data", marks=pytest.mark.long)]
)
def test_a_resumed_worker_goes_on_to_the_bit(setup, tmp_path):
    save_model(tmp_path / "model", tied=False, experts=4, norm_topk_prob=True, num_key_value_heads=2)
    torch.save(torch.tensor(some_sequences(*[12] * 12)), tmp_path / "found-sequences")
    arguments = tmp_path / "model", tmp_path / "found", json.dumps(SETUPS[setup])
    on_ranks("megatron_checkpoint.py", 2, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    for rank in range(2):
        found = torch.load(tmp_path / f"found-{rank}", weights_only=False)
        assert found["steps"] == [[3.0], [3.0]]
        for name, weight in found["saved"].items():
            assert weight.equal(found["loaded"][name]), name
            assert not weight.equal(found["on"][name]), name
            assert found["on"][name].equal(found["resumed"][name]), name
