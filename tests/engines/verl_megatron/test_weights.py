"""mbridge on Megatron's local layers: it loads and exports the very weights of the files, however ranks split them."""

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.tiny_models import perturb, save_model, some_sequences
from support.verl_launch import ON_MEGATRON, on_ranks

PROMPT = 4
DENSE, TIED = {"tied": False}, {"tied": True}
EXPERTS = {"tied": False, "experts": 4, "norm_topk_prob": True}  # mbridge knows no other router of Qwen3-MoE
TENSOR, PIPELINE, EXPERT = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
SETUPS = {
    "dense, one rank": (1, DENSE, {}),
    "dense, padded rows": (1, DENSE, {"packed": False}),
    "dense, tensor parallel, padded vocabulary": (2, DENSE, TENSOR | {"pad_vocabulary": 128}),
    "tied, pipeline parallel": (2, TIED, PIPELINE),
    "dense, context parallel": (2, DENSE, {"context_parallel_size": 2}),
    "experts, expert parallel": (2, EXPERTS, EXPERT),
    "experts, tensor parallel": (2, EXPERTS, TENSOR),
    "experts, tensor parallel but not inside experts": (2, EXPERTS, TENSOR | EXPERT | {"expert_tensor_parallel_size": 1}),
    "experts, pipeline of two virtual stages": (
        2, EXPERTS | {"num_hidden_layers": 4}, PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
    ),
}  # fmt: skip


QUICK = ("dense, tensor parallel, padded vocabulary", "tied, pipeline parallel", "experts, expert parallel")
"""The setups that CI runs."""


def marked(name):
    marks = [pytest.mark.xdist_group(name), *(() if name in QUICK else (pytest.mark.long,))]
    return pytest.param(name, id=name, marks=marks)


@pytest.fixture(scope="module", params=map(marked, SETUPS))
def run(request, tmp_path_factory):
    """The model's folder and all that the ranks found; every weight, norms too, is different from every other."""
    ranks, model, how = SETUPS[request.param]
    folder = tmp_path_factory.mktemp("megatron")
    save_model(folder / "model", num_key_value_heads=2, **model)
    moved = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(1)
    perturb(moved, 0.1)
    moved.save_pretrained(folder / "model")
    torch.save(torch.tensor(some_sequences(*[12] * 4)), folder / "found-sequences")
    arguments = folder / "model", folder / "found", json.dumps(how)
    on_ranks("megatron_weights.py", ranks, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    return folder, [torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(ranks)]


def test_every_rank_exports_the_files_weights_to_the_bit(run):
    folder, found = run
    wanted = load_file(folder / "model" / "model.safetensors")
    assert any("norm" in name for name in wanted)
    for rank in found:
        assert rank["weights"].keys() == wanted.keys()
        for name, weight in wanted.items():
            assert torch.equal(rank["weights"][name], weight), name


def test_each_weight_is_at_its_place(run):
    """Two weights that change places on the way in and back again on the way out would pass the other test."""
    folder, found = run
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    sequences = torch.load(folder / "found-sequences")
    logits = model(input_ids=sequences[:, :-1]).logits.detach()
    unused = found[0]["vocabulary"] - logits.shape[-1]  # Megatron's rows of padding have weights, and logits, of 0
    logp = torch.nn.functional.pad(logits, (0, unused)).log_softmax(-1)
    wanted = logp.gather(-1, sequences[:, 1:, None])[:, PROMPT - 1 :, 0]
    answers = [rank["logp"] for rank in found if rank["logp"] is not None]
    assert answers
    for ours in answers:
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
