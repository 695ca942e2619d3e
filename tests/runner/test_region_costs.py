"""Costs of regions under verl's layouts, against formulas by hand and against what the vocabulary pass sends."""

import json
from dataclasses import replace

import pytest
import torch

import trustrl
from support.loss_memory import REGIONS as MEASURED, loss_peak
from support.recipes import SHIPPED, small
from trustrl.core.token_logprobs import AnchorStates, VocabShard, token_logprobs
from trustrl.kernels import devices, vocab_parallel
from trustrl.regions.recommended import SAMPLED_TOKEN, TOP_K
from trustrl.runner import region_costs as costs
from trustrl.runner.layout import Layout
from trustrl.runner.model_shape import shape_of
from trustrl.runner.plan import plan, text
from trustrl.runner.plan_estimates import memory
from trustrl.runner.recipe import load

(MOE,) = (file for file in SHIPPED if file.stem == "qwen3-moe-megatron")
V, D, TOKENS = 151_936, 2048, 64 * 16 * 16_384
"""Vocabulary, hidden size, and completion tokens of a step of the recipe, of which a batch has two."""

GPUS = ("engine.device=cuda", "sampler.kind=vllm", "layout.strategy=fsdp2")
PARAM_DTYPE = "engine.settings.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"

REGIONS = {
    "sampled token": trustrl.preset("dppo-binary-tv"),
    "Top-K on the sampler": trustrl.preset("dppo-topk-tv"),
    "TROLL": trustrl.preset("troll"),
    "TROLL that fills": trustrl.preset("troll", rest="fill"),
    "exact": trustrl.preset("dppo-full-tv", anchor="proximal"),
}


def cost(region, layout=None, *overrides, file=MOE):
    recipe = replace(load(file, overrides), region=REGIONS.get(region, region))
    layout = layout or recipe.layout
    return costs.region_cost(recipe, "it", layout, shape_of(recipe.model), chosen=True)


def memory_of(region, *overrides, file=MOE):
    recipe = replace(load(file, overrides), region=REGIONS[region])
    return memory(recipe, shape_of(recipe.model), recipe.layout)


@pytest.mark.parametrize(
    ("region", "kept", "anchor", "update"),
    [
        ("sampled token", 0, 0, 0),
        ("Top-K on the sampler", 8 * 20, 0, 4 * 23),
        ("TROLL", 8 * 64 + 8, 12 + 12 * 64, 4 * 67),
        ("TROLL that fills", 8 * 64 + 8, 12 + 12 * 64, 4 * 67 + 12 * 64),
        ("exact", 2 * D + 8, 12, 12 + 8),
    ],
)
def test_the_formulas_of_each_kind_of_region(region, kept, anchor, update):
    found = cost(region)
    assert found.record_bytes_per_token == kept
    assert found.record_bytes == kept * 2 * TOKENS // 2, "of a batch, on each rank of one of two replicas"
    assert (found.anchor_sends_per_token, found.update_sends_per_token) == (anchor, update)
    assert found.sends_per_step == (anchor + update) * TOKENS // 2 // 2, "two replicas, and two ranks share a sequence"


class Wire:
    """Counts what a rank contributes to collectives, as the only rank of its group."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        monkeypatch.setattr(vocab_parallel, "_all_gather", lambda x, group: self.count(x).unsqueeze(0))
        monkeypatch.setattr(vocab_parallel.dist, "all_reduce", lambda x, group: self.count(x))
        monkeypatch.setattr(vocab_parallel.dist, "get_rank", lambda group: 0)

    def count(self, x):
        self.bytes += x.numel() * x.element_size()
        return x

    def take(self):
        found, self.bytes = self.bytes, 0
        return found


@pytest.mark.parametrize("sums", [False, True], ids=["sequence parallelism", "without it"])
@pytest.mark.parametrize("region", [one for one in REGIONS if one != "sampled token"])
def test_a_pass_sends_what_the_plan_says(region, sums, monkeypatch):
    tokens, size, words = 3, 16, 200
    needs, wire = REGIONS[region].needs(), Wire(monkeypatch)
    torch.manual_seed(0)
    hidden, head = torch.randn(tokens, size), torch.randn(words, size)
    ids, shard = torch.randint(words, (tokens,)), VocabShard(None, 0, reduce_hidden_gradient=sums)
    layout = Layout(strategy="megatron", tensor_parallel=2, sequence_parallel=not sums)
    planned = cost(region, layout, f"model.hidden_size={size}")
    with torch.no_grad():
        recorded = token_logprobs(hidden, head, ids, top_k=needs.topk, shard=shard)
    sent = wire.take()
    if needs.anchor == "proximal":  # the sampler records its own
        assert sent == tokens * planned.anchor_sends_per_token
    out = token_logprobs(
        hidden.requires_grad_(), head.requires_grad_(), ids, shard=shard, entropy="detached",
        gather_ids=recorded.topk.ids if needs.topk else None, top_k=needs.topk if needs.own_topk == "fill" else 0,
        against=AnchorStates(hidden.detach(), head.detach(), None, recorded.logsumexp) if needs.full else None,
    )  # fmt: skip
    out.logp.sum().backward()
    assert wire.take() == tokens * planned.update_sends_per_token


def test_without_tensor_parallelism_nothing_is_sent():
    for region in REGIONS:
        found = cost(region, Layout(strategy="fsdp2", ulysses_parallel=4))
        assert (found.anchor_sends_per_token, found.update_sends_per_token, found.sends_per_step) == (0, 0, 0)


def test_a_pass_holds_the_shard_s_gradient_and_a_buffer():
    assert (costs.SLICE_BYTES, costs.SLICES) == (devices.BUFFER_BYTES, devices.SLICES)
    shard, tokens = 2 * V // 4 * D, 16_384  # what verl puts into a micro-batch of one rank
    buffer = 2 * tokens * V // 4 // 16 + 2 * tokens * D
    assert cost("sampled token").vocabulary_pass_bytes == 0
    assert cost("TROLL").vocabulary_pass_bytes == shard + tokens * (6 * D + 31 * 64) + buffer
    assert cost("exact").vocabulary_pass_bytes == shard + tokens * 6 * D + buffer
    assert cost("exact").output_layer_copy_bytes == shard
    assert cost("TROLL").output_layer_copy_bytes == 0


def test_on_a_cpu_the_buffer_is_a_tile():
    assert (costs.TILE_ROWS, costs.TILE_COLUMNS) == devices.CPU_TILE
    shard, tokens, tile, sums = 2 * V // 4 * D, 4096, 2 * 1024 * 4096, 4 * 4096 * D
    cpu = "engine.device=cpu", "schedule.max_completion_tokens=4096"
    assert cost("TROLL", None, *cpu).vocabulary_pass_bytes == shard + tokens * (6 * D + 31 * 64) + tile + sums
    assert cost("exact", None, *cpu).vocabulary_pass_bytes == shard + tokens * 6 * D + 2 * tile + sums


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        pytest.param([], 16_384, id="verl's own limit"),
        pytest.param(["engine.settings.actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"], 9000, id="another limit"),
        pytest.param(["schedule.max_completion_tokens=99_000"], 100_024 // 2, id="a sequence above the limit"),
        pytest.param(["engine.micro_batch=1"], (1024 + 16_384) // 2, id="one sequence, shared by two ranks"),
        pytest.param(["schedule.max_completion_tokens=26"], 16_384, id="many short sequences"),
        pytest.param(
            ["schedule.max_completion_tokens=26", "schedule.max_prompt_tokens=4", "schedule.prompts_per_step=2"],
            2 * 16 * 30 // 2 // 2, id="a step that is one micro-batch",
        ),
    ],
)  # fmt: skip
def test_the_tokens_of_a_micro_batch_on_a_rank(overrides, tokens):
    recipe = load(MOE, overrides)
    assert costs.micro_batch_tokens(recipe, recipe.layout) == tokens


TAIL = ["schedule.prompts_per_step=8", "schedule.max_completion_tokens=32768", "schedule.mean_completion_tokens=1272"]
"""32 completions: one of 32,768 tokens, and 31 of 256."""


def planned_tail(name, engine, *overrides):
    sizes = [*TAIL, "engine.micro_batch=32", "schedule.updates_per_batch=1", *overrides]
    return plan(replace(small(f"engine.name={engine}", *sizes), region=MEASURED[name]))


@pytest.mark.parametrize(("engine", "record", "padded"), [("trl", 4 + 8 * 64 + 4, 82), ("verl", 8 * 64 + 8, 25)])
@pytest.mark.parametrize(("name", "per_id"), [("dppo-topk-tv", 41), ("dppo-topk-kl", 72), ("troll", 57)])
def test_a_long_tail_costs_its_tokens_and_only_what_the_engine_pads_costs_the_longest(
    engine, record, padded, name, per_id
):
    """One micro-batch. `support.loss_memory` measured 111.0, 190.4 and 151.4 MB; 110.9, 191.6 and 152.6 are planned."""
    tokens, made = 32_768 + 31 * 256, planned_tail(name, engine)
    assert made.counts["completion_tokens_per_batch"] == tokens
    assert made.memory["region_records"] == tokens * record
    assert made.memory["region_loss"] == tokens * (64 * per_id + 100)
    assert made.memory["padded_by_the_engine"] == 32 * 32_768 * padded
    assert "completions of 1,272 on average and at most 32,768" in text(made)


def test_without_a_mean_length_every_completion_may_be_the_longest():
    made = plan(small("engine.name=verl", "region.preset=troll", "engine.micro_batch=4"))
    assert made.memory["region_loss"] == 4 * 4 * (64 * 57 + 100)
    assert made.memory["region_records"] == 16 * 4 * (64 * 8 + 8)


@pytest.mark.parametrize("k", [20, 64])
@pytest.mark.parametrize("name", MEASURED)
def test_a_loss_holds_what_the_plan_says(name, k):
    region = trustrl.preset(name, anchor="proximal", k=k)
    assert loss_peak(region, 512) == pytest.approx(512 * costs.loss_bytes_per_token(region), rel=0.1)


@pytest.mark.parametrize(
    ("overrides", "loss", "rows"),
    [
        pytest.param([], 2 * 16_384, 1, id="verl's own limit, on each of two ranks that share sequences"),
        pytest.param(["schedule.mean_completion_tokens=1024"], 2 * 16_384, 16, id="short sequences"),
        pytest.param(["engine.micro_batch=4"], 4 * 16_384, 4, id="four sequences"),
        pytest.param(["engine.micro_batch=4", "schedule.mean_completion_tokens=1024"], 16_384, 4, id="one of them long"),
    ],
)  # fmt: skip
def test_the_tokens_of_a_loss_and_the_rows_that_are_padded(overrides, loss, rows):
    recipe = load(MOE, overrides)
    assert costs.loss_tokens(recipe, recipe.layout) == loss
    assert costs.padded_bytes(recipe, recipe.layout) == rows * 16_384 * 25


def test_megatron_splits_experts_and_other_weights_differently():
    found = memory_of("TROLL")
    experts, total = 28_991_029_248, 30_532_122_624
    on_rank = round(((total - experts) / 4 + experts / 8) / 2)
    assert found["weights"] == 2 * on_rank
    assert found["gradients"] == 4 * on_rank
    assert found["adam"] == 12 * total / 32
    assert found["vocabulary_pass"] == cost("TROLL").vocabulary_pass_bytes
    assert found["total"] == sum(value for name, value in found.items() if name != "total")


def test_an_unknown_share_of_experts_is_said_and_not_guessed():
    recipe = load(MOE)
    recipe = replace(recipe, model=replace(recipe.model, expert_parameters=None))
    assert memory(recipe, shape_of(recipe.model), recipe.layout)["weights"] is None
    dense = replace(recipe.layout, expert_parallel=1, expert_tensor_parallel=None)
    assert memory(recipe, shape_of(recipe.model), dense)["weights"] == 2 * 30_532_122_624 // 8


def test_megatron_s_logits_are_a_lower_bound_and_fsdp_s_were_measured():
    found = memory_of("sampled token")
    assert found["logits_at_least"] == 4 * 16_384 * V // 4
    assert "logits" not in found
    on_fsdp = [
        "layout.strategy=fsdp2", "layout.ulysses_parallel=2", "engine.micro_batch=1", "schedule.max_prompt_tokens=8",
        "schedule.max_completion_tokens=2040",
    ]  # fmt: skip
    (file,) = (one for one in SHIPPED if one.stem == "qwen3-8gpu")
    assert memory_of("sampled token", *on_fsdp, file=file)["logits"] == pytest.approx(2724e6, rel=0.01)
    assert "vocabulary_pass" not in memory_of("sampled token", *on_fsdp, file=file)


def test_ranks_that_share_a_sequence_keep_all_of_its_records():
    alone, shared = (cost("TROLL", Layout(strategy="fsdp2", ulysses_parallel=size)) for size in (1, 4))
    assert shared.record_bytes == 4 * alone.record_bytes
    assert shared.record_bytes_per_token == alone.record_bytes_per_token


def test_a_plan_compares_the_recipe_s_region_with_one_of_each_kind():
    made = plan(load(MOE))
    assert [(one.region, one.chosen) for one in made.region_costs] == [
        (SAMPLED_TOKEN, False), (TOP_K, True), ("troll", False), ("dppo-full-tv, proximal", False),
    ]  # fmt: skip
    assert made.counts["replicas"] == 2
    assert json.loads(json.dumps(made.to_dict(), default=str))["layout"]["tensor_parallel"] == 4
    said = text(made)
    assert "on each rank of the last stage" in said
    assert "tensor parallel         4" in said
    names = {TOP_K: "Top-K on the sampler", "troll": "TROLL", "dppo-full-tv, proximal": "exact"}
    for one in made.region_costs[1:]:
        assert one == replace(cost(names[one.region]), region=one.region, chosen=one.region == TOP_K)


def test_another_setting_of_a_compared_region_is_listed_first():
    overrides = ["engine.name=verl", "region.preset=troll", "region.k=32"]
    made = plan(small(*overrides))
    assert [one.region for one in made.region_costs] == ["troll", *costs.COMPARED]
    assert [one.chosen for one in made.region_costs] == [True, False, False, False, False]
    assert [one.record_bytes_per_token for one in made.region_costs[::3]] == [8 * 32 + 8, 8 * 64 + 8]
    assert "troll (this recipe)" in text(made)


@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        pytest.param([*GPUS], 2, id="FSDP on GPUs"),
        pytest.param([], 4, id="FSDP on a CPU"),
        pytest.param([*GPUS, f"{PARAM_DTYPE}=fp32"], 4, id="FSDP on GPUs, as the settings say"),
        pytest.param([*GPUS, "layout.strategy=megatron", "model.dtype=bfloat16"], 2, id="Megatron"),
    ],
)
def test_verl_with_fsdp_computes_in_a_dtype_of_its_own(overrides, width):
    """An exact region records hidden states in that dtype, whatever the weights' is."""
    recipe = small("engine.name=verl", "region.preset=dppo-full-tv", "region.anchor=proximal", *overrides)
    assert plan(recipe).roles.record_bytes == width * 128 + 8
    (chosen,) = (row for row in plan(recipe).region_costs if row.chosen)
    assert chosen.record_bytes_per_token == width * 128 + 8


def test_trl_has_no_layout():
    made = plan(small())
    assert (made.layout, made.region_costs) == (None, [])
    assert "Layout" not in text(made)
    assert "costs of regions" not in text(made)
