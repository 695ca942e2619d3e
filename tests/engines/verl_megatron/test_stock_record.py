"""verl's own loss on Megatron, recorded: one rank of each model writes what the last pipeline stage computed."""

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("pyarrow")

import torch

from support.verl_launch import ON_MEGATRON, on_ranks
from trustrl.recording import read, read_run, read_sequences


@pytest.mark.parametrize(
    ("how", "writes"), [({"pp": 2}, [1]), pytest.param({"tp": 2}, [0], marks=pytest.mark.long)], ids=["pp", "tp"]
)
def test_one_rank_of_the_last_stage_records(how, writes, tmp_path):
    arguments = tmp_path, json.dumps(how)
    on_ranks("megatron_stock_record.py", 2, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    found = [torch.load(tmp_path / f"found-{rank}", weights_only=False) for rank in range(2)]
    assert all(one["facts"]["same"] and one["facts"]["moved"] for one in found)
    assert [rank for rank, one in enumerate(found) if one["facts"]["speaks"]] == writes
    tokens, batch = read(tmp_path / "records"), found[writes[0]]["batch"]
    assert tokens["rank"].unique().tolist() == writes
    on = batch["in_loss"]
    assert torch.equal(tokens["token_id"], batch["responses"][on].int())
    assert torch.equal(tokens["behavior_logp"], batch["behavior_logp"][on])
    # The policy has not moved: its log-probs are those of the plain model.
    assert (tokens["policy_logp"] - batch["proximal_logp"][on]).abs().max() < 1e-4
    assert len(read_sequences(tmp_path / "records")) == len(on)
    assert read_run(tmp_path / "records")["engine"]["settings"]["strategy"] == "megatron"
