"""Our trainer against TRL's own loss: the same model, the same settings, the same batch, the same parameter gradients."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import trustrl
from support import trl_world as world
from support.trl_parity import CLASSIC, CLIP, LARGEST_ERROR, Case, adapted, compared, stops_and_keeps
from trustrl import regions


def same(found: dict[str, float], wanted: dict[str, float], *prefixes: str) -> None:
    """The metrics that start with one of these are there, the same ones, with the same values."""
    names = {name for name in wanted if name.startswith(prefixes)}
    assert all(any(name.startswith(prefix) for name in names) for prefix in prefixes)
    assert names == {name for name in found if name.startswith(prefixes)}
    assert {name: found[name] for name in names} == pytest.approx(
        {name: wanted[name] for name in names}, rel=2e-6, abs=1e-7
    )


# ── each of TRL's clips has a region that is the same ───────────────────────────────────────────────────────────────

CLIPS = {
    "ppo": Case(regions.PPO(CLASSIC)),
    "ppo from the trainer's own log-probs": Case(regions.PPO(CLASSIC, anchor="proximal")),
    "ppo in its textbook form": Case(CLIP),
    "ppo with a higher upper bound": Case(
        regions.PPO(regions.Ratio(max_decrease=0.1, max_increase=0.28)), {"epsilon": 0.1, "epsilon_high": 0.28}
    ),
    "ppo with dual clip": Case(
        regions.PPO(CLASSIC, dual_clip=1.25), {"delta": 1.25}, batch={"noise": 0.5}
    ),
    "gspo": Case(
        regions.GSPO(regions.SequenceRatio(max_decrease=0.008, max_increase=0.008)),
        {"importance_sampling_level": "sequence", "epsilon": 0.008, "epsilon_high": 0.008},
        both={"loss_type": "grpo"},
        batch={"noise": 0.15},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIPS)
def test_a_region_is_trls_own_clip(name):
    found, wanted = compared(CLIPS[name])
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


WEIGHTS = {
    "cispo": Case(
        trustrl.preset("cispo"),
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "dapo"},
        batch={"noise": 1.3},
    ),
    "sapo": Case(trustrl.preset("sapo"), {"loss_type": "sapo"}, {"loss_type": "grpo"}),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_region_that_stops_nothing_is_trls_own_weight(name):
    """And the weight acts: without it the gradient is another one."""
    case = WEIGHTS[name]
    found, wanted = compared(case)
    free, _ = compared(case._replace(region=trustrl.preset("pg-is")))
    assert found.metrics["trustrl/masked_share"] == 0
    assert 0.05 < found.metrics.get("trustrl/capped_share", 0.5) < 0.6
    assert world.error(found.gradient, free.gradient) > 0.05
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


# ── TRL's averages, and everything else in its loss, stays TRL's ────────────────────────────────────────────────────


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("accumulated", "per_generation"), [(1, 1), (2, 4), (4, 2)])
def test_every_average_is_trls(loss_type, mode, accumulated, per_generation):
    """Loss, gradient and logged policy loss."""
    both = {
        "loss_type": loss_type, "gradient_accumulation_steps": accumulated, "steps_per_generation": per_generation,
        "entropy_coef": 1e-3,  # makes TRL log the policy loss
    }  # fmt: skip
    case = Case(CLIP, both=both, batch={"steps_per_generation": per_generation, "tools": True})
    found, wanted = compared(case, mode)
    assert stops_and_keeps(found.metrics)
    assert found.loss == pytest.approx(wanted.loss, rel=LARGEST_ERROR, abs=1e-7)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    same(found.metrics, wanted.metrics, "policy_loss", "entropy", "clip_ratio/")
    assert found.metrics["trustrl/entropy"] == pytest.approx(wanted.metrics["entropy"], rel=2e-6)


def test_evaluation_without_gradients_gives_trls_loss():
    """As TRL's `prediction_step` calls it."""
    inputs = world.batch(world.tiny_model())
    losses, made_a_graph = [], []
    for trainer in (world.ours(CLIP), world.stock()):
        trainer.model.eval()
        trainer.model.register_forward_hook(lambda *_: made_a_graph.append(torch.is_grad_enabled()))
        with torch.no_grad():
            losses.append(trainer._compute_loss(trainer.model, inputs))
    found, wanted = losses
    assert not found.requires_grad
    assert made_a_graph == [False, False]
    assert found.item() == pytest.approx(wanted.item(), rel=LARGEST_ERROR)


TERMS = {
    "kl": {"both": {"beta": 0.1}},
    "kl corrected for the sampler": {"both": {"beta": 0.1, "use_bias_correction_kl": True}},
    "kl alone in an average of sequences": {
        "both": {"beta": 0.1, "use_bias_correction_kl": True, "loss_type": "grpo", "gradient_accumulation_steps": 2}
    },
    "entropy": {"both": {"entropy_coef": 0.05}},
    "entropy and kl": {"both": {"entropy_coef": 0.05, "beta": 0.1, "use_bias_correction_kl": True}},
    "tools": {"batch": {"tools": True}, "both": {"beta": 0.1}},
    "a truncated completion": {"batch": {"truncated_row": True}, "both": {"beta": 0.1}},
    "a truncated completion in an average of sequences": {
        "batch": {"truncated_row": True, "tools": True}, "both": {"loss_type": "grpo"}
    },
    "advantages per token": {"batch": {"advantages_per_token": True}},
    "temperature": {"both": {"temperature": 0.7}, "batch": {"temperature": 0.7}},
    "gradient checkpointing": {"both": {"gradient_checkpointing": True}},
    "an output layer in float32": {"both": {"cast_lm_head_to_fp32": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", TERMS)
def test_everything_else_in_the_loss_is_trls(name):
    found, wanted = compared(Case(regions.PPO(CLASSIC), **TERMS[name]))
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    logged = ["entropy", "clip_ratio/"] + ["kl"] * ("beta" in TERMS[name].get("both", {}))
    same(found.metrics, wanted.metrics, *logged)


def test_the_adaptive_entropy_bonus_follows_trls_course():
    """Three steps: the coefficient moves after each, so the later gradients differ from the first."""
    both = {"use_adaptive_entropy": True, "entropy_target": 50.0, "entropy_coef": 0.01, "entropy_coef_delta": 0.02}
    inputs = world.batch(world.tiny_model())
    mine, theirs = world.ours(regions.PPO(CLASSIC), **both), world.stock(**both)
    courses = []
    for _ in range(3):
        found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
        assert stops_and_keeps(found.metrics)
        assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
        same(found.metrics, wanted.metrics, "entropy_coef")
        courses.append(found)
    assert courses[0].metrics["entropy_coef"] < courses[2].metrics["entropy_coef"]
    assert world.error(courses[2].gradient, courses[0].gradient) > 1e-3


def test_the_router_loss_of_experts_is_trls():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    def model():
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        return world.tiny_model(
            Qwen3MoeConfig, Qwen3MoeForCausalLM, output_router_logits=True, router_aux_loss_coef=0.5, **experts
        )

    found, wanted = compared(Case(regions.PPO(CLASSIC)), model=model)
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    same(found.metrics, wanted.metrics, "aux_loss")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_get_trls_gradient(checkpointing):
    both = {"gradient_checkpointing": checkpointing, "entropy_coef": 0.05}
    mine, theirs = adapted(regions.PPO(CLASSIC), **both), adapted(None, **both)
    inputs = world.batch(theirs.model)
    found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
    assert all("lora" in name for name in wanted.gradient)
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


@pytest.mark.parametrize("float32_head", [False, True])
def test_bfloat16_autocast_gives_trls_gradient(float32_head):
    both = {"bf16": True, "cast_lm_head_to_fp32": float32_head}
    found, wanted = compared(Case(regions.PPO(CLASSIC), both=both))
    exact, _ = compared(Case(regions.PPO(CLASSIC)))
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, exact.gradient) > 1e-3  # bfloat16 was at work
    assert world.error(found.gradient, wanted.gradient) <= 1e-3


@pytest.mark.parametrize("correction", ["trl", "trustrl"])
def test_the_samplers_mismatch_is_corrected_once(correction):
    """By TRL's own importance weights over a region on the trainer's log-probs, or by the region's correction."""
    inputs = world.batch(world.tiny_model())
    region = regions.PPO(
        CLASSIC, anchor="proximal", correction=None if correction == "trl" else regions.TIS(max_ratio=2.0)
    )
    mine, theirs = world.ours(region), world.stock()
    for trainer, corrects in ((mine, correction == "trl"), (theirs, True)):
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, corrects
    inputs["trustrl_behavior_logp"] = inputs["sampling_per_token_logps"]
    found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
    uncorrected = world.result(world.stock(), inputs)
    assert stops_and_keeps(found.metrics)
    assert world.error(found.gradient, uncorrected.gradient) > 0.05
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    same(found.metrics, wanted.metrics, "clip_ratio/")


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_trls_correction_leaves_a_regions_own_penalty_alone(factor):
    """With A = 0 only TROLL's pull towards the ball is left, which is no importance-weighted term."""
    inputs = world.batch(world.tiny_model(), noise=1.0)
    inputs["advantages"] = torch.zeros(6)
    found = []
    for by in (1.0, factor):
        trainer = world.ours(regions.TROLL(k=20))
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = torch.full_like(inputs["old_per_token_logps"], by)
        found.append(world.result(trainer, inputs))
    assert found[0].metrics["trustrl/projected_share"] > 0.1
    assert world.error(found[1].gradient, found[0].gradient) <= LARGEST_ERROR
    assert found[1].metrics["trustrl/loss_weight"] == pytest.approx(1)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_trls_correction_is_no_wrong_average(loss_type):
    inputs = world.batch(world.tiny_model(), noise=0.0)
    inputs["importance_sampling_ratio"] = torch.full_like(inputs["old_per_token_logps"], 0.5)
    trainer = world.ours(regions.PPO(anchor="proximal"), loss_type=loss_type, given={"startup_checks": True})
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    with pytest.warns(trustrl.errors.TrustRLWarning) as said:
        world.result(trainer, inputs)
    assert [str(one.message) for one in said if "masked no token" not in str(one.message)] == []


# ── micro-batches ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_micro_batches_add_up_to_the_whole(loss_type):
    """Gradients and metrics of two micro-batches in one step. (TRL's bnpo averages each by its own tokens.)"""
    inputs = world.batch(world.tiny_model(), tools=True)
    whole = world.ours(CLIP, loss_type=loss_type)
    wanted = world.result(whole, inputs)
    split = world.ours(CLIP, loss_type=loss_type, gradient_accumulation_steps=2, steps_per_generation=2)
    split.model.train()
    for rows, last in ((slice(0, 3), False), (slice(3, 6), True)):
        part = {name: x if name == "num_items_in_batch" else x[rows] for name, x in inputs.items()}
        split.accelerator.gradient_state._set_sync_gradients(last)
        split._compute_loss(split.model, part).backward()
        assert ("trustrl/masked_share" in split._metrics["train"]) is last
    found = world.logged(split)
    assert stops_and_keeps(found)
    assert world.error(world.gradients(split), wanted.gradient) <= LARGEST_ERROR
    same(found, wanted.metrics, "clip_ratio/", "trustrl/")


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_first_step_that_is_no_average_is_said_aloud(loss_type, factor):
    """As if TRL divided by accumulated micro-batches that are not there. A truncated row is not what it warns of."""
    inputs = world.batch(world.tiny_model(), truncated_row=True)
    inputs["trustrl_version"] = inputs["trustrl_version"] - 1  # the policy has moved since: no ratio of 1 to expect
    trainer = world.ours(CLIP, loss_type=loss_type, given={"startup_checks": True})
    trainer.current_gradient_accumulation_steps = factor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world.result(trainer, inputs)
        world.result(trainer, inputs)
    said = [str(w.message) for w in caught if w.category is trustrl.errors.TrustRLWarning]
    assert len(said) == (factor > 1)  # once, not at every step
    if factor > 1:
        assert f"{1 / factor:g} times the configured one" in said[0]


def test_a_truncated_completion_is_not_the_least_stopped_one():
    """`clip_ratio/low_min` is over sequences with tokens, as TRL's."""
    inputs = world.batch(world.tiny_model(), truncated_row=True)
    for name in ("old_per_token_logps", "trustrl_behavior_logp"):
        inputs[name] = inputs[name] + 0.3 * inputs["completion_mask"]
    inputs["advantages"] = -torch.ones(6)
    found, wanted = world.result(world.ours(regions.PPO(CLASSIC)), inputs), world.result(world.stock(), inputs)
    assert wanted.metrics["clip_ratio/low_min"] > 0
    same(found.metrics, wanted.metrics, "clip_ratio/")


def test_a_micro_batch_of_truncated_completions_changes_nothing():
    """Also as the first one, where the start-up checks look."""
    inputs = world.batch(world.tiny_model())
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * 0
    trainer = world.ours(regions.PPO(CLASSIC), given={"startup_checks": True})
    found = world.result(trainer, inputs)
    assert found.loss == 0
    assert all((x == 0).all() for x in found.gradient.values())
    assert all(math.isfinite(x) for name, x in found.metrics.items() if name.startswith(("clip_ratio/", "trustrl/")))
    assert trainer._first_loss  # they look at the next one


# ── tokens that are not numbers ─────────────────────────────────────────────────────────────────────────────────────

FAULTS = {
    "nan from the model": ("model", math.nan, "trustrl/fault_policy"),
    "no probability from the model": ("model", -math.inf, "trustrl/fault_policy"),
    "nan from the sampler": ("trustrl_behavior_logp", math.nan, "trustrl/fault_behavior"),
    "no probability from the sampler": ("trustrl_behavior_logp", -math.inf, "trustrl/fault_behavior"),
    "nan as advantage": ("advantages", math.nan, "trustrl/fault_advantage"),
}


def run_with_fault(name: str, value: float | None, monkeypatch: Any, **settings: Any) -> world.Result:
    """One token's number replaced by `value`; with None the token is taken out of the loss instead."""
    inputs = world.batch(world.tiny_model(), advantages_per_token=True)
    trainer = world.ours(regions.PPO(CLASSIC), **settings)
    row, column = 1, 4
    if value is None:
        inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
        inputs["tool_mask"][row, column] = 0
    elif name == "model":
        original = trainer.model.forward

        def forward(*args, **kwargs):
            out = original(*args, **kwargs)
            here = torch.zeros(out.log_probs.shape, dtype=torch.bool)
            here[row, column - world.COMPLETION] = True
            out.log_probs = torch.where(here, value, out.log_probs)
            return out

        monkeypatch.setattr(trainer.model, "forward", forward)
    else:
        inputs[name] = inputs[name].clone()
        inputs[name][row, column] = value
    return world.result(trainer, inputs)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.1, "use_bias_correction_kl": True}], ids=["plain", "kl with its correction"]
)
def test_a_token_that_is_no_number_is_left_out_and_counted(fault, settings, monkeypatch):
    """Nothing else changes: without other terms the gradient is that of the batch without the token."""
    where, value, counted = FAULTS[fault]
    with pytest.warns(trustrl.errors.TrustRLWarning, match="1.9% of this step's tokens were dropped"):
        found = run_with_fault(where, value, monkeypatch, **settings)
    assert found.metrics[counted] == 1
    assert found.metrics["trustrl/dropped_share"] == pytest.approx(1 / 52)
    assert math.isfinite(found.loss)
    assert all(x.isfinite().all() for x in found.gradient.values())
    assert math.isfinite(found.metrics["trustrl/loss_weight"])
    if not settings:
        without = run_with_fault(where, None, monkeypatch)
        assert without.metrics[counted] == 0
        assert world.error(found.gradient, without.gradient) <= LARGEST_ERROR


# ── regions that need more of the vocabulary use an output layer of their own ───────────────────────────────────────


def gemma():
    """Softcapped logits and a tied output layer."""
    more = {"final_logit_softcapping": 4.0, "tie_word_embeddings": True, "attn_implementation": "eager"}
    return world.tiny_model(Gemma2Config, Gemma2ForCausalLM, **more)


def granite():
    """Logits divided by a number."""
    return world.tiny_model(GraniteConfig, GraniteForCausalLM, logits_scaling=0.6)


def cohere():
    """Logits multiplied with a number."""
    return world.tiny_model(CohereConfig, CohereForCausalLM, logit_scale=1.7)


def phi():
    """An output layer with a bias."""
    model = world.tiny_model(PhiConfig, PhiForCausalLM)
    torch.nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {"qwen": world.tiny_model, "gemma": gemma, "granite": granite, "cohere": cohere, "phi": phi}
UNBOUNDED = regions.DPPO(regions.TopKTV(max_increase=math.inf))
"""Looks at the top K and stops nothing: the policy gradient with the weight r."""
NO_CLIP = {"epsilon": 1e9}
"""TRL's own policy gradient with the weight r."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_our_output_layer_gives_trls_gradient(name, temperature):
    """With an entropy bonus and a corrected KL beside it."""
    both = {"entropy_coef": 0.05, "beta": 0.1, "use_bias_correction_kl": True, "temperature": temperature}
    batch = {"temperature": temperature, "tools": True}
    found, wanted = compared(Case(UNBOUNDED, NO_CLIP, both=both, batch=batch), model=MODELS[name])
    assert found.metrics["trustrl/masked_share"] == found.metrics["trustrl/dropped_share"] == 0
    assert found.metrics["trustrl/divergence_mean"] > 0.01  # it did look
    assert world.error(found.gradient, wanted.gradient) <= 1e-5
    same_to_rounding = {name: pytest.approx(wanted.metrics[name], rel=1e-5) for name in ("entropy", "kl")}
    assert {name: found.metrics[name] for name in same_to_rounding} == same_to_rounding


VOCABULARY_TERMS = {
    "entropy": {"both": {"entropy_coef": 0.05}},
    "gradient checkpointing": {"both": {"gradient_checkpointing": True}},
    "a truncated completion": {"batch": {"truncated_row": True}, "both": {"loss_type": "grpo"}},
    "evaluation": {},
}


@pytest.mark.parametrize("name", VOCABULARY_TERMS)
def test_our_output_layer_leaves_everything_else_to_trl(name):
    mode = "eval" if name == "evaluation" else "train"
    found, wanted = compared(Case(UNBOUNDED, NO_CLIP, **VOCABULARY_TERMS[name]), mode)
    assert world.error(found.gradient, wanted.gradient) <= 1e-5


@pytest.mark.parametrize("entropy", [0.0, 0.05])
def test_our_output_layer_gives_adapters_trls_gradient(entropy):
    """The layer itself is frozen there, and its gradient is made another way unless the entropy has one."""
    both = {"entropy_coef": entropy}
    mine, theirs = adapted(UNBOUNDED, **both), adapted(None, **both, **NO_CLIP)
    inputs = world.batch(theirs.model)
    found, wanted = world.result(mine, inputs), world.result(theirs, inputs)
    assert all("lora" in name for name in wanted.gradient)
    assert world.error(found.gradient, wanted.gradient) <= 1e-5


@pytest.mark.parametrize("float32_head", [False, True])
@pytest.mark.parametrize("weights", ["autocast", "bfloat16"])
def test_our_output_layer_is_as_close_to_the_truth_as_trls_in_bfloat16(float32_head, weights):
    """And TRL's own where `cast_lm_head_to_fp32` asks for products in float32."""

    def model():
        made = world.tiny_model()
        return made.bfloat16() if weights == "bfloat16" else made

    both = {"bf16": weights == "autocast", "cast_lm_head_to_fp32": float32_head}
    inputs = world.batch(world.tiny_model())
    truth = world.result(world.stock(**NO_CLIP), inputs)
    found = world.result(world.ours(UNBOUNDED, model(), **both), inputs)
    wanted = world.result(world.stock(model(), **both, **NO_CLIP), inputs)
    theirs = world.error(wanted.gradient, truth.gradient)
    assert theirs > 1e-3  # bfloat16 was at work
    assert world.error(found.gradient, truth.gradient) <= 1.2 * theirs
    assert not float32_head or world.error(found.gradient, wanted.gradient) <= 1e-3


def plain(region: regions.Region, model: Any, before: Any, inputs: dict[str, Any]) -> world.Result:
    """The core's own loss on plain logits of two models, without any trainer."""
    needs = region.needs()
    in_loss = inputs["completion_mask"].bool()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -world.COMPLETION - 1 : -1]
    logp, anchor = torch.log_softmax(logits, dim=-1), world.logprobs(before, inputs)
    sampled = inputs["completion_ids"].unsqueeze(-1)
    topk, more = None, {}
    if needs.topk:
        top = anchor.topk(needs.topk, dim=-1)

        def tail(x):
            known = torch.zeros_like(x, dtype=torch.bool).scatter(-1, top.indices, True).scatter(-1, sampled, True)
            return torch.logsumexp(x.masked_fill(known, -torch.inf), dim=-1)

        topk = trustrl.TopK(top.indices, top.values, of=needs.anchor, tail_logp=tail(anchor))
        more = {"topk_logp": logp.gather(-1, top.indices), "tail_logp": tail(logp)}
        if needs.own_topk == "fill":
            own = logp.topk(needs.topk, dim=-1)
            more["topk"] = trustrl.TopK(own.indices, own.values, of=needs.anchor)
    full = trustrl.FullVocabulary(anchor, of=needs.anchor) if needs.full else None
    rollout = trustrl.RolloutTokens(
        advantage=inputs["advantages"], in_loss=in_loss, token_ids=inputs["completion_ids"], topk=topk, full=full,
        **{f"{needs.anchor}_logp": world.at_sampled(anchor, inputs)},
    )  # fmt: skip
    policy = trustrl.PolicyTokens(
        logp=logp.gather(-1, sampled).squeeze(-1), full_logp=logp if needs.full else None, **more
    )
    reduction = trustrl.TokenMean(num_tokens=int(in_loss.sum()))
    if needs.reduction is not None:
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=len(in_loss))
    model.zero_grad()
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
    out.loss.backward()
    return world.Result(out.loss.item(), world.gradients(SimpleNamespace(model=model)), trustrl.rates(out.sums))


DRIFTS = {"qwen": 0.02, "gemma": 0.06, "granite": 0.005, "cohere": 0.015, "phi": 0.03}
"""How far a model's weights move after the rollout, so that some tokens leave the region and some do not."""
ON_EVERY_MODEL = {
    "top-k tv": regions.DPPO(regions.TopKTV(max_increase=0.15)),
    "full kl": regions.DPPO(regions.FullKL(max_increase=0.05)),
    "projection": regions.TROLL(bound=0.1, k=16),
}
ON_ONE_MODEL = {
    "top-k kl": trustrl.preset("dppo-topk-kl"),
    "top-k tv from the trainer's log-probs": trustrl.preset("dppo-topk-tv", anchor="proximal"),
    "full tv": trustrl.preset("dppo-full-tv"),
    "prefix budget": trustrl.preset("cppo"),
    "whole sequences": regions.TRM(regions.TopKKL(max_increase=0.4)),
    "projection with the paper's fill": regions.TROLL(bound=3.0, k=16, rest="fill"),
}
RECORDED = [(model, kind, region) for model in MODELS for kind, region in ON_EVERY_MODEL.items()]
RECORDED += [("qwen", kind, region) for kind, region in ON_ONE_MODEL.items()]


NEEDS = {name: trustrl.preset(name).needs() for name in trustrl.presets()}
SAMPLED = [name for name, its in NEEDS.items() if not (its.topk or its.full or len(its.anchors) > 1)]
LITTLE = {"gspo": 2e-4, "trm-sampled": 2e-3, "flash-reinforce": 2e-3}
"""Where the usual drift takes every sequence out of the region."""


@pytest.mark.parametrize("name", SAMPLED)
def test_a_preset_on_the_sampled_token_has_the_cores_verdicts_and_gradient(name):
    region = trustrl.preset(name)
    average = {"loss_type": "grpo"} if NEEDS[name].reduction else {}
    trainer, before = world.ours(region, world.tiny_model(), **average), world.tiny_model()
    inputs = world.sequences()
    world.draw(before, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    recorded = trainer._recorder.record(trainer.model, inputs, version=-1, rows=4)
    world.drift(trainer.model, LITTLE.get(name, DRIFTS["qwen"]))
    found = world.result(trainer, inputs | recorded)
    wanted = plain(region, trainer.model, before, inputs)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    assert found.metrics["trustrl/masked_share"] == wanted.metrics["trustrl/masked_share"]
    assert found.metrics["trustrl/ratio_max"] > 1.0  # something has moved


@pytest.mark.parametrize(("weights", "largest_error"), [(torch.float32, 1e-5), (torch.float64, LARGEST_ERROR)])
@pytest.mark.parametrize("weight", [None, regions.TIS(max_ratio=1.1)], ids=["no ratio", "capped ratio"])
def test_score_centering_gets_what_plain_logits_give(weight, weights, largest_error):
    """It masks and projects nothing: the gradient is compared, and differs from that without the centering term."""
    region = regions.ScoreCentering(k=16, weight=weight)
    trainer, before = world.ours(region, world.tiny_model().to(weights)), world.tiny_model().to(weights)
    inputs = world.sequences()
    world.draw(before, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    recorded = trainer._recorder.record(trainer.model, inputs, version=-1, rows=4)
    world.drift(trainer.model, DRIFTS["qwen"])
    found = world.result(trainer, inputs | recorded)
    wanted, uncentered = (plain(one, trainer.model, before, inputs) for one in (region, trustrl.preset("pg-is")))
    assert found.metrics["trustrl/dropped_share"] == 0
    assert world.error(found.gradient, wanted.gradient) <= largest_error
    assert world.error(found.gradient, uncentered.gradient) > 0.01


@pytest.mark.parametrize(("weights", "largest_error"), [(torch.float32, 1e-5), (torch.float64, LARGEST_ERROR)])
@pytest.mark.parametrize(("name", "kind", "region"), RECORDED, ids=[f"{name}: {kind}" for name, kind, _ in RECORDED])
def test_a_region_on_the_vocabulary_gets_what_plain_logits_give(name, kind, region, weights, largest_error):
    """Recorded by the trainer at the rollout weights, then the weights drift. In float32 two orders of sums differ."""
    trainer, before = world.ours(region, MODELS[name]().to(weights)), MODELS[name]().to(weights)
    inputs = world.sequences()
    if name == "gemma":  # in float64 transformers' own attention makes NaN of a row that is padding only
        inputs["prompt_mask"].fill_(1)
    world.draw(before, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    if region.needs().full:
        trainer._remember_head()
    recorded = trainer._recorder.record(trainer.model, inputs, version=-1, rows=4)
    if region.needs().topk:  # padding is not scored
        assert list(map(len, recorded["trustrl_topk_ids"])) == inputs["completion_mask"].sum(-1).tolist()
    world.drift(trainer.model, DRIFTS[name])
    found = world.result(trainer, inputs | recorded)
    wanted = plain(region, trainer.model, before, inputs)
    acting = found.metrics["trustrl/projected_share" if "projection" in kind else "trustrl/masked_share"]
    assert 0.05 < acting < 0.95
    assert found.metrics["trustrl/dropped_share"] == 0
    assert world.error(found.gradient, wanted.gradient) <= largest_error
    distance = "trustrl/projected_kl_before" if "projection" in kind else "trustrl/divergence_mean"
    assert found.metrics[distance] == pytest.approx(wanted.metrics[distance], rel=1e-4)


def test_masses_outside_the_top_k_are_exact_where_differences_are_not(monkeypatch):
    """1 − Σ of float32 probabilities knows nothing below 1e-7; a sharp model's tails are smaller."""
    model = world.tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    trainer = world.ours(trustrl.preset("dppo-topk-kl"), model)
    inputs = world.sequences()
    world.draw(model, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    recorded = trainer._recorder.record(trainer.model, inputs, version=-1, rows=4)
    seen = world.spy(monkeypatch)
    world.result(trainer, inputs | recorded)
    _, policy, rollout = seen[0]
    on = inputs["completion_mask"].bool()
    known = torch.cat([rollout.topk.ids.clamp(min=0), inputs["completion_ids"][on].unsqueeze(-1)], dim=-1)
    logp = world.logprobs(model, inputs)[on].double().scatter(-1, known, -torch.inf)
    truth = torch.logsumexp(logp, dim=-1).float()
    assert truth.min() < math.log(1e-8)
    torch.testing.assert_close(policy.tail_logp, truth, atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout.topk.tail_logp, truth, atol=1e-4, rtol=0)


def test_an_evaluation_between_two_steps_of_a_rollout_leaves_its_output_layer_alone(monkeypatch):
    """Exact divergences are measured against the weights that sampled, not those of the last evaluation."""

    def measured(**more):
        data = Dataset.from_dict({"prompt": ["1+1=", "2+1="]})
        trainer = world.ours(
            regions.DPPO(regions.FullTV(), anchor="proximal"), given={"eval_dataset": data}, max_steps=2, learning_rate=3e-2,
            steps_per_generation=2, gradient_accumulation_steps=1, **more,
        )  # fmt: skip
        with monkeypatch.context() as patched:
            seen = world.spy(patched)
            trainer.train()
        return [policy.full_divergence.tv[rollout.in_loss] for out, policy, rollout in seen if out.loss.requires_grad]

    alone, interrupted = measured(), measured(eval_strategy="steps", eval_steps=1)
    assert len(alone) == len(interrupted) == 2
    assert alone[1].mean() > 0.1  # the weights have moved
    torch.testing.assert_close(interrupted[1], alone[1])
