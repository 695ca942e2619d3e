"""Plans: who is who, how much of everything, and the engine's own settings."""

import json
import sys
import warnings

import pytest

from support.recipes import SHIPPED, TRIGGERS, small
from trustrl.errors import ConfigError, TrustRLWarning
from trustrl.runner.plan import SMALLEST_RATES, plan, text
from trustrl.runner.recipe import load


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_every_shipped_recipe_can_be_planned(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrustRLWarning)
        made = plan(load(file))
    assert json.loads(json.dumps(made.to_dict(), default=str))["counts"]["steps"] == made.recipe.schedule.steps
    assert "unknown" not in text(made), "every shipped recipe says how large its model is"


@pytest.mark.parametrize(
    ("recipe", "overrides", "warned"),
    [
        ("dppo-dense", ["model.dtype=bfloat16"], True),
        ("dppo-dense", ["model.dtype=bfloat16", "optimiser.learning_rate=1e-4"], False),
        ("dppo-dense", ["model.dtype=float16", "optimiser.learning_rate=9e-6"], True),
        ("dppo-dense", [], False),
        ("dppo-lora", ["model.dtype=bfloat16"], False),
        ("dppo-moe", [], False),  # Megatron
        ("gsm8k", ["model.dtype=bfloat16", "sampler.dtype=bfloat16"], True),  # TRL
    ],
)
def test_a_plan_warns_of_weights_too_coarse_for_their_updates(recipe, overrides, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan(load(recipe, overrides))
    texts = [str(warning.message) for warning in caught]
    assert any("hardly move at optimiser.learning_rate" in text for text in texts) == warned, texts


def test_one_rank_of_a_run_warns(monkeypatch):
    recipe = load("dppo-dense", ["model.dtype=bfloat16"])
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(TrustRLWarning, match="hardly move"):
        plan(recipe)
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrustRLWarning)
        plan(recipe)


@pytest.mark.parametrize("dtype", SMALLEST_RATES)
def test_weights_move_at_the_smallest_rate_and_not_at_a_tenth_of_it(dtype):
    """Share of weights that a hundred AdamW updates in one direction change."""
    torch = pytest.importorskip("torch")

    def moved(rate):
        start = 0.02 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
        weights = start.to(getattr(torch, dtype)).requires_grad_()
        optimizer = torch.optim.AdamW([weights], lr=rate, weight_decay=0.0, eps=1e-6)
        before = weights.detach().clone()
        for _ in range(100):
            weights.grad = 0.1 * before.sign()
            optimizer.step()
        return (weights != before).double().mean().item()

    assert moved(SMALLEST_RATES[dtype]) > 0.85
    assert moved(SMALLEST_RATES[dtype] / 10) < 0.3
    assert moved(SMALLEST_RATES[dtype] / 100) < 0.05


@pytest.mark.parametrize("file", [f for f in SHIPPED if f.stem.startswith("qwen3")], ids=lambda f: f.stem)
def test_templates_say_that_they_were_not_run(file):
    assert "not run" in file.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("overrides", "distribution", "passes", "record_bytes"),
    [
        pytest.param([], "not needed", 0, 4, id="TRL, sampled token: TRL's own pass serves two updates"),
        pytest.param(["schedule.updates_per_batch=1"], "not needed", 1, 4, id="TRL, sampled token, on-policy"),
        pytest.param(["region.preset=dppo-topk-tv"], "forward pass of the trainer", 1, 4 + 8 * 20 + 4, id="TRL, Top-K"),
        pytest.param(
            ["region.preset=dppo-topk-tv", "sampler.kind=vllm"], "recorded by the sampler while it decodes", 0, 4 + 8 * 20 + 4,
            id="TRL, Top-K of vLLM",
        ),
        pytest.param(
            ["region.preset=dppo-full-tv"], "full distribution of the behavior", 1, 4 + 4 * 128 + 4, id="TRL, exact"
        ),
        pytest.param(["region.preset=minirl"], "not needed", 0, 8, id="TRL, two anchors"),
        pytest.param(["engine.name=verl"], "not needed", 0, 0, id="verl, sampled token"),
        pytest.param(
            ["engine.name=verl", "region.preset=dppo-topk-tv"], "while it decodes", 0, 160, id="verl, Top-K"
        ),
        pytest.param(["engine.name=verl", "region.preset=troll"], "of the trainer", 1, 8 * 64 + 8, id="verl, TROLL"),
    ],
)  # fmt: skip
def test_roles_and_costs_are_the_engine_pages_formulas(overrides, distribution, passes, record_bytes):
    roles = plan(small(*overrides)).roles
    assert distribution in roles.distribution
    assert len(roles.passes) == passes
    assert roles.record_bytes == record_bytes


@pytest.mark.parametrize("engine", ["trl", "verl"])
def test_an_exact_region_on_a_sampler_that_records_ids_only_is_refused(engine):
    with pytest.raises(ConfigError, match="must be 'proximal'"):
        plan(small(f"engine.name={engine}", "sampler.kind=vllm", "region.preset=dppo-full-tv"))


ACTOR = "engine.settings.actor_rollout_ref.actor"
ROLLOUT = "engine.settings.actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param([f"{ACTOR}.strategy=torchtitan"], "strategy must be fsdp2, fsdp, veomni or megatron", id="torchtitan"),
        pytest.param(["engine.settings.model_engine=torchtitan"], "got 'torchtitan'", id="torchtitan by its group"),
        pytest.param(
            ["engine.settings.model_engine=megatron", f"{ACTOR}.megatron.use_megatron_fsdp=true"],
            "use_megatron_fsdp must be False", id="Megatron-FSDP",
        ),
        pytest.param(["engine.settings.async_training={}"], "async_training must be absent", id="the legacy asynchronous trainer"),
        pytest.param([f"{ROLLOUT}.repetition_penalty=1.1"], "repetition_penalty must be 1.0", id="a penalty"),
        pytest.param([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs=5"], "at least 20", id="few ids"),
    ],
)  # fmt: skip
def test_a_plan_refuses_what_verl_with_a_region_would_refuse(overrides, says):
    """Top-K on the sampler; the engine asks the same rows (tests/engines/verl/test_refusals.py)."""
    with pytest.raises(ConfigError, match=says):
        plan(small("engine.name=verl", "region.preset=dppo-topk-tv", *overrides))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param(["engine.settings.loss_type=cispo"], "loss_type must be an average", id="a loss that is a region"),
        pytest.param(["engine.settings.top_p=0.9"], "top_p must be 1.0", id="truncated sampling"),
        pytest.param(["engine.settings.epsilon_high=0.28"], "epsilon_high must be left at None", id="a bound of TRL's"),
        pytest.param(
            ["sampler.kind=vllm", "engine.settings.vllm_importance_sampling_correction=true"],
            "vllm_importance_sampling_correction must be False", id="a mismatch counted twice",
        ),
    ],
)  # fmt: skip
def test_a_plan_refuses_what_trl_with_a_region_would_refuse(overrides, says):
    """The engine asks the same rows (tests/engines/trl/test_refusals.py)."""
    with pytest.raises(ConfigError, match=says):
        plan(small(*overrides))


def test_an_exact_region_on_gpus_must_name_fsdp2():
    exact = [
        "engine.name=verl",
        "engine.device=cuda",
        "sampler.kind=vllm",
        "region.preset=dppo-full-tv",
        "region.anchor=proximal",
    ]
    with pytest.raises(ConfigError, match="strategy must be fsdp2"):
        plan(small(*exact))
    assert plan(small(*exact, f"{ACTOR}.strategy=fsdp2")).engine["command"]


@pytest.mark.parametrize("more", [["engine.settings.model_engine=megatron"], ["engine.settings.model_engine=dp"]])
def test_a_sampled_token_s_region_is_planned_on_any_engine_of_verl(more):
    assert plan(small("engine.name=verl", "engine.device=cuda", "sampler.kind=vllm", *more)).engine["command"]


def test_counts_of_a_batch_that_is_seen_again_and_of_one_in_parts():
    again = plan(small("schedule.updates_per_batch=4")).counts
    parts = plan(small("schedule.updates_per_batch=4", "schedule.update_sees=part")).counts
    assert (again["sequences_per_batch"], parts["sequences_per_batch"]) == (16, 64)
    assert again["batches"] == parts["batches"] == 2
    assert (again["completion_tokens_sampled"], parts["completion_tokens_sampled"]) == (128, 512)


def grpo(*overrides):
    return plan(small(*overrides)).engine["GRPOConfig"]


def test_trl_gets_the_same_schedule_in_its_own_words():
    again, parts = grpo("engine.micro_batch=4"), grpo("engine.micro_batch=4", "schedule.update_sees=part")
    for fields, iterations, per_generation in ((again, 2, 4), (parts, 1, 8)):
        assert fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"] == 16
        assert (fields["num_iterations"], fields["steps_per_generation"]) == (iterations, per_generation)
    assert again["save_steps"] % 2 == 0, "checkpoints lie between batches"


def test_a_region_per_sequence_gets_the_only_average_it_has():
    assert grpo("region.preset=gspo")["loss_type"] == "grpo"
    command = plan(small("region.preset=gspo", "engine.name=verl")).engine["command"]
    assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean" in command


def test_vllm_on_trl_counts_the_mismatch_once():
    assert grpo("sampler.kind=vllm")["vllm_importance_sampling_correction"] is False
    assert grpo("sampler.kind=vllm", "region.preset=troll")["vllm_importance_sampling_correction"] is True


def test_vllm_has_room_for_the_longest_sequence_and_for_the_start_up_check():
    assert grpo("sampler.kind=vllm")["vllm_max_model_length"] >= 25
    assert grpo("sampler.kind=vllm", "schedule.max_completion_tokens=500")["vllm_max_model_length"] == 8 + 500 + 1


def test_settings_of_the_engine_win():
    assert grpo("engine.settings.beta=0.01", "engine.settings.logging_steps=5")["beta"] == 0.01
    command = plan(small("engine.name=verl", "engine.settings.trainer.total_epochs=7")).engine["command"]
    assert [one for one in command if one.startswith("trainer.total_epochs=")] == ["trainer.total_epochs=7"]


def test_verl_gets_a_preset_by_name_and_anything_else_in_full():
    by_name = plan(small("engine.name=verl")).engine["command"]
    assert "actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv" in by_name
    in_full = plan(small("engine.name=verl", "region.divergence.max_increase=0.2")).engine["command"]
    assert "actor_rollout_ref.actor.policy_loss.loss_mode=trustrl" in in_full
    assert "+actor_rollout_ref.actor.policy_loss.region.divergence.max_increase=0.2" in in_full
    assert "+actor_rollout_ref.actor.policy_loss.region.kind=dppo" in in_full
    assert not any(one.endswith("=null") for one in in_full)


def test_verl_gets_the_records_beside_a_preset_s_name(tmp_path):
    command = plan(small("engine.name=verl", TRIGGERS), tmp_path).engine["command"]
    loss = "actor_rollout_ref.actor.policy_loss"
    assert f"{loss}.loss_mode=trustrl-dppo-binary-tv" in command
    assert f"{loss}._target_=trustrl.engines.verl.RegionLossConfig" in command
    assert f"+{loss}.recording.folder={tmp_path}/records" in command
    assert not any(f"{loss}.recording" in one for one in plan(small("engine.name=verl")).engine["command"])


def test_verl_gets_the_same_schedule_in_its_own_words():
    parts = plan(small("engine.name=verl", "schedule.update_sees=part")).engine["command"]
    assert {"data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"} <= set(parts)
    assert {"actor_rollout_ref.actor.ppo_epochs=1", "trainer.total_training_steps=4"} <= set(parts)
    again = plan(small("engine.name=verl")).engine["command"]
    assert {"data.train_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2"} <= set(again)


def test_memory_is_split_over_verls_ranks_and_whole_on_each_of_trls():
    split = plan(small("engine.name=verl", "engine.ranks_per_node=4")).memory
    whole = plan(small("engine.ranks_per_node=4")).memory
    assert whole["weights"] == 4 * split["weights"] == 4 * 722_304
    assert whole["adam"] == 2 * whole["weights"]
    assert whole["logits"] == 0 < split["logits"]


def test_an_unknown_size_is_said_and_not_guessed():
    made = plan(small("model.name=Nobody/Nothing"))
    assert made.memory["weights"] is None
    assert made.memory["total"] is None
    assert "unknown" in text(made)


@pytest.mark.parametrize(
    ("overrides", "per_token"),
    [
        pytest.param(["records.sample=0.5"], 57, id="the sampled token"),
        pytest.param(["records.sample=0.5", "region.preset=dppo-topk-tv"], 57, id="a top-K that is not recorded"),
        pytest.param(
            ["records.sample=0.5", "region.preset=dppo-topk-tv", "records.topk=true"],
            57 + 8 * 20 + 4,
            id="and one that is",
        ),
    ],
)
def test_a_plan_says_where_records_go_and_what_they_take(overrides, per_token, tmp_path):
    made = plan(small(*overrides), tmp_path)
    assert made.to_dict()["records"] == {"folder": f"{tmp_path}/records", "bytes_per_token": per_token}
    assert made.engine["TrustRegionGRPOTrainer"]["recording"]["folder"] == f"{tmp_path}/records"
    for words in (f"directory     {tmp_path}/records", "50% of the sequences", f"up to {per_token} bytes per token"):
        assert words in text(made)


def test_a_plan_without_records_does_not_speak_of_them():
    made = plan(small())
    assert made.to_dict()["records"] is None
    assert "Records" not in text(made)


def test_planning_loads_no_torch():
    import subprocess

    recipes = list(map(str, SHIPPED))
    code = (
        "import sys; from trustrl.runner.recipe import load; from trustrl.runner.plan import plan; "
        f"[plan(load(one)) for one in {recipes!r}]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_cost_follows_from_a_throughput_and_a_price():
    small_run = small("schedule.updates_per_batch=1", "engine.ranks_per_node=2")
    tokens = plan(small_run).counts["completion_tokens_sampled"]
    made = plan(small_run, tokens_per_second=tokens / 7200, price=3.0)
    assert made.to_dict()["cost"] == pytest.approx({"gpu_hours": 2.0, "hours": 1.0, "price": 6.0})
    for words in (f"= {tokens:,} / (3,600 × ", "= 2 / 2 = 1 hours", "= 2 × 3 = 6"):
        assert words in text(made)


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, ["--tokens-per-second", "--price"]), ({"price": 2.0}, ["--tokens-per-second"]), ({"tokens_per_second": 9.0}, ["--price"])],
)  # fmt: skip
def test_a_plan_says_what_its_cost_lacks(given, missing):
    made = plan(small(), **given)
    assert [option for option in ("--tokens-per-second", "--price") if f"give {option}," in text(made)] == missing
    assert made.to_dict()["cost"]["price"] is None


@pytest.mark.parametrize("option", ["tokens_per_second", "price"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_throughput_or_price_must_be_a_positive_number(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} must be a finite number > 0"):
        plan(small(), **{option: value})


def test_the_header_names_what_a_run_trains_on():
    assert "on open-r1/DAPO-Math-17k-Processed with dppo" in text(plan(load("dppo-dense")))
    files = ["engine.name=verl", "engine.settings.data.train_files=['/data/a.parquet', '/data/b.parquet']"]
    assert "on /data/a.parquet, /data/b.parquet with" in text(plan(small(*files)))


def test_adapters_on_verls_megatron_are_refused():
    with pytest.raises(ConfigError, match=r"must be 'fsdp' or 'fsdp2' with \[lora\]"):
        plan(load("dppo-moe", ["lora.rank=32"]))


def test_adapters_of_a_paper_need_less_memory_than_full_training():
    """Rank × (rows + columns) of the matrices of Qwen3-8B: 36 layers of sizes 4,096, 1,024 and 12,288."""
    adapters, full = (plan(load(name)).memory for name in ("dppo-lora", "dppo-dense"))
    exact = 32 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    assert adapters["weights"] == full["weights"]
    assert adapters["gradients"] == pytest.approx(4 * exact / 16, rel=0.1)
    assert adapters["adam"] == 2 * adapters["gradients"]
    assert adapters["adam"] < full["adam"] / 50
