"""What the TRL engine refuses: before the model is loaded where it can, and always with the setting and what to do."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from peft import LoraConfig, get_peft_model
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from support.refusal_examples import TRL, cases
from trustrl import regions
from trustrl.engines.common import seam
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.common.step_check import check_first_loss
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import VocabularyForward, refuse_adapted_head, softcap
from trustrl.engines.common.vocabulary_read import Opaque, at_completions
from trustrl.engines.refusals.trl import ROWS
from trustrl.engines.trl import (
    TrustRegionGRPOTrainer,
    TrustRegionMixin,
    sampler,
    trainer as engine,
    trainer_checks as callbacks,
)
from trustrl.engines.trl.trainer_checks import check_model, check_settings
from trustrl.errors import ConfigError, EngineError, MissingDataError
from trustrl.recording import Recording

VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": False}
SAMPLER = {"behavior": "sampler"}

# name: (region, our arguments, TRL's settings, what the message must say)
SETTINGS = {
    "a word that is no source": (regions.PPO(), {"behavior": "oracle"}, {}, ["behavior", "'sampler', 'trainer'", "oracle"]),
    "cispo as an average": (regions.PPO(), {}, {"loss_type": "cispo"}, ["loss_type='dapo'", "trustrl.preset('cispo')"]),
    "sapo as an average": (regions.PPO(), {}, {"loss_type": "sapo"}, ["loss_type='grpo'", "trustrl.preset('sapo')"]),
    "vespo as an average": (regions.PPO(), {}, {"loss_type": "vespo"}, ["loss_type='dapo'", "trustrl.preset('vespo')"]),
    "an average nobody knows": (regions.PPO(), {}, {"loss_type": "mine"}, ["loss_type", "grpo, bnpo, dr_grpo, dapo, luspo"]),
    "gspo averaged over tokens": (trustrl.preset("gspo"), {}, {"loss_type": "dapo"}, ["loss_type must be 'grpo'"]),
    **{
        f"routed experts of {name}": (
            regions.PPO(), {"recording": Recording(folder="records", experts=True), **ours}, theirs,
            ["recording.experts must be False without a colocated vLLM", 'vllm_mode="colocate"'],
        )
        for name, ours, theirs in (
            ("transformers", {}, {}), ("a server", SAMPLER, {**VLLM, "vllm_mode": "server"}),
        )
    },
    "ratios of sequences": (
        regions.PPO(), {}, {"importance_sampling_level": "sequence"}, ["importance_sampling_level", "trustrl.preset('gspo')"]
    ),
    "a bound of TRL's": (regions.PPO(), {}, {"epsilon": 0.3}, ["epsilon must be left at 0.2", "trustrl.preset('ppo'"]),
    "an upper bound of TRL's": (regions.PPO(), {}, {"epsilon_high": 0.28}, ["epsilon_high must be left at None", "trustrl.preset('ppo'"]),
    "a dual clip of TRL's": (regions.PPO(), {}, {"delta": 2.0}, ["delta must be left at None", "trustrl.preset('ppo'"]),
    "part of the tokens": (regions.PPO(), {}, {"top_entropy_quantile": 0.2}, ["top_entropy_quantile must be 1.0"]),
    "a second region": (
        regions.PPO(), {}, {"off_policy_mask_threshold": 0.5}, ["off_policy_mask_threshold must be None", "trustrl.regions.OPSM"]
    ),
    "a replaced forward pass": (regions.PPO(), {}, {"use_liger_kernel": True}, ["use_liger_kernel must be False", "Liger"]),
    "a replaced loss": (regions.PPO(), {}, {"use_liger_loss": True}, ["use_liger_loss must be False", "Liger"]),
    "vllm's tokens with the trainer's log-probs": (
        regions.PPO(), {"behavior": "trainer"}, VLLM, ["behavior must be 'sampler'", "anchor='proximal'"]
    ),
    "a mismatch counted twice": (
        regions.PPO(), SAMPLER, {"use_vllm": True},
        ["vllm_importance_sampling_correction must be False", "anchor='proximal'"],
    ),
    "a sampler without log-probs": (
        regions.DPPO(), SAMPLER, {}, ["behavior must be 'trainer'", "behavior='trainer'", "use_vllm=True", "dppo"]
    ),
    "a sampler without log-probs, by default": (
        regions.DPPO(), {"behavior": None}, {}, ["behavior must be 'trainer'", "use_vllm=True"]
    ),
    "a correction without the sampler's log-probs": (
        trustrl.preset("tis"), SAMPLER, {}, ["behavior must be 'trainer'", "use_vllm=True"]
    ),
    "a projection of the vocabulary": (regions.TROLL(support="full"), {}, {}, ["region must be on a top-K support", "support='topk'"]),
    "the sampler's whole distribution": (
        regions.DPPO(regions.FullTV()), SAMPLER, VLLM, ["region must be a Top-K or Binary one", "anchor='proximal'"]
    ),
    "top-p": (regions.PPO(), {}, {"top_p": 0.9}, ["top_p must be 1.0", "colocated vLLM or a rollout_func"]),
    "top-k": (regions.PPO(), {}, {"top_k": 50}, ["top_k must be 0", "colocated vLLM or a rollout_func"]),
    "min-p": (regions.PPO(), {}, {"min_p": 0.1}, ["min_p must be None", "colocated vLLM or a rollout_func"]),
    "a repetition penalty": (regions.PPO(), {}, {"repetition_penalty": 1.1}, ["repetition_penalty must be 1.0", "π"]),
    "a grammar": (
        regions.PPO(), {}, {"vllm_structured_outputs_regex": "[0-9]+"},
        ["vllm_structured_outputs_regex must be None", "whole vocabulary"],
    ),
    "another temperature": (
        regions.PPO(), {}, {"generation_kwargs": {"temperature": 0.5}},
        ["generation_kwargs['temperature'] must be left out", "temperature with TRL's own setting"],
    ),
    "banned words": (
        regions.PPO(), {}, {"generation_kwargs": {"seed": 3, "suppress_tokens": [5]}},
        ["generation_kwargs['suppress_tokens'] must be left out"],
    ),
    "options for a vllm that is not there": (
        regions.PPO(), {"vllm_options": {"dtype": "float32"}}, {}, ["vllm_options must be None", "command line"]
    ),
    "a region by name": ("ppo", {}, {}, ["region must be a trustrl region, got 'ppo'", "trustrl.preset("]),
    "no region": (None, {}, {}, ["region must be a trustrl region, got None", "trustrl.preset("]),
}  # fmt: skip


def settings(**more: Any) -> Any:
    """TRL's settings; a name this TRL does not have is set all the same."""
    known = {name: value for name, value in more.items() if name in world.GRPOConfig.__dataclass_fields__}
    args = world.settings(**known)
    for name in more.keys() - known.keys():
        setattr(args, name, more[name])
    return args


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_setting_is_refused_before_the_model_is_loaded(name, monkeypatch):
    region, given, trl_settings, says = SETTINGS[name]
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("TRL began to build the trainer"))
    given = {k: v for k, v in ({"behavior": "trainer"} | given).items() if v is not None}
    with pytest.raises(ConfigError) as error:
        TrustRegionGRPOTrainer("no/such-model", [], settings(**trl_settings), region=region, **given)
    for part in says:
        assert part in str(error.value)


ALLOWED = {
    "a harmless keyword": (regions.PPO(), {"behavior": "trainer"}, {"generation_kwargs": {"max_new_tokens": 4}}),
    "the trainer's own anchor": (regions.PPO(anchor="proximal"), SAMPLER, {}),
    "gspo averaged over sequences": (trustrl.preset("gspo"), {"behavior": "trainer"}, {"loss_type": "grpo"}),
    "an exact divergence from the trainer": (regions.DPPO(regions.FullTV(), anchor="proximal"), SAMPLER, {}),
    "a sampler of one's own": (regions.DPPO(), SAMPLER | {"rollout_func": print}, {}),
    "a top-K of the trainer beside a sampler of one's own": (
        trustrl.preset("dppo-topk-tv", anchor="proximal"),
        SAMPLER | {"rollout_func": print},
        {},
    ),
    "another temperature where both know it": (regions.PPO(), {"behavior": "trainer"}, {"temperature": 0.7}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_goes_with_a_region_is_not_refused(name):
    region, given, trl_settings = ALLOWED[name]
    assert world.ours(region, given=given, **trl_settings).region is region


def test_trls_correction_may_stay_beside_a_proximal_anchor():
    region = regions.PPO(anchor="proximal")
    check_settings(settings(use_vllm=True), region, "sampler")
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction"):
        check_settings(settings(use_vllm=True), regions.DPPO(), "sampler")


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────


ADAPTERS = {
    "an adapter on it": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]),
    "a trained copy of it": LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_output_layer_whose_weight_is_not_all_of_it_is_refused(adapter):
    model = get_peft_model(world.tiny_model(), ADAPTERS[adapter])
    with pytest.raises(ConfigError, match=r"output layer must be a plain linear layer.*Leave the output layer out of"):
        refuse_adapted_head(engine._base_model(model))
    # TRL has come to refuse the adapter itself, in words of its own.
    for region in (regions.PPO(), trustrl.preset("dppo-topk-tv")):
        with pytest.raises(ValueError, match=r"`target_modules`"):
            world.ours(region, given={"peft_config": ADAPTERS[adapter]})


def test_a_quantised_output_layer_is_refused():
    layer = torch.nn.Linear(4, 8)
    layer.weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"must be a plain linear layer.*quantization"):
        refuse_adapted_head(SimpleNamespace(get_output_embeddings=lambda: layer))
    refuse_adapted_head(SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(4, 8)))


def moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return world.tiny_model(Qwen3MoeConfig, Qwen3MoeForCausalLM, output_router_logits=True, **experts)


def test_router_losses_are_refused_where_our_own_output_layer_runs():
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef must be 0.*got 0.001.*does not compute router losses"):
        world.ours(trustrl.preset("dppo-topk-tv"), moe())
    assert world.ours(regions.PPO(), moe()).aux_loss_enabled


def test_weights_that_zero_3_takes_apart_are_refused_where_our_own_output_layer_runs(monkeypatch):
    trainer = world.ours(trustrl.preset("dppo-topk-tv"))
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    check_model(trainer, regions.PPO(), output_layer=None)
    with pytest.raises(ConfigError, match=r"ZeRO stage must be below 3.*Use FSDP2"):
        check_model(trainer, trainer.region, output_layer=None)


def test_exact_divergences_need_the_rollout_weights_head():
    model = world.tiny_model()
    forward = VocabularyForward(model, float32_head=False)
    inputs = world.sequences()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    where = TokenPlaces.of_mask(torch.ones_like(inputs["completion_ids"], dtype=torch.bool))
    wanted = at_completions(ids, where, anchor_hidden=torch.zeros(6 * world.COMPLETION, 64))
    call = {"input_ids": ids, "labels": ids, "trustrl_vocabulary": Opaque(wanted)}
    with pytest.raises(EngineError, match="need the head of the rollout weights, and none was kept"):
        model(**call)
    forward.remember_head(model)
    assert model(**call).tv.shape == (6 * world.COMPLETION,)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"])
def test_every_familys_word_for_a_cap_on_logits_is_known(name):
    assert softcap(SimpleNamespace(**{name: 30.0})) == 30.0
    assert softcap(SimpleNamespace(**{name: None})) is None


def test_a_model_that_caps_its_logits_has_its_own_log_probs():
    """RecurrentGemma, whose word for the cap is not Gemma's."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            **shape, num_attention_heads=2, lru_width=32, logits_soft_cap=2.0, attention_window_size=16
        )
    ).eval()
    ids = torch.randint(3, 60, (2, 10))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        logp = torch.log_softmax(model(ids).logits[:, 5:-1], -1).gather(-1, ids[:, 6:, None]).squeeze(-1)
        VocabularyForward(model, float32_head=True)
        where = TokenPlaces.of_mask(torch.ones(2, 4, dtype=torch.bool))
        found = model(input_ids=ids, trustrl_vocabulary=Opaque(at_completions(ids, where))).log_probs
    torch.testing.assert_close(where.padded(found), logp, atol=1e-5, rtol=0)


# ── TRL itself: what the adapter relies on ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("region", "version", "least"),
    [
        (trustrl.preset("dppo-topk-tv"), "1.8.2", "1.9"),
        (regions.TROLL(), "1.8.2", "1.9"),
        (regions.DPPO(regions.FullTV(), anchor="proximal"), "1.14.2", "1.15"),
    ],
)
def test_a_trl_that_never_ran_a_kind_of_region_is_refused(region, version, least, monkeypatch):
    monkeypatch.setattr(seam.metadata, "version", lambda _: version)
    with pytest.raises(EngineError, match=rf'trl must be at least {least}, got {version}.*pip install "trl>={least}"'):
        world.ours(region)


def test_a_package_that_is_not_there_is_refused():
    with pytest.raises(EngineError, match=r"trustrl-nothing is not installed.*pip install trustrl-nothing"):
        seam.version_of("trustrl-nothing")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1.16.0", (1, 16, 0)), ("1.15.0.dev0", (1, 15, 0)), ("1.9rc12", (1, 9)), ("2.0.post1+cpu", (2, 0))],
)
def test_versions_are_read_by_their_leading_numbers(text, numbers, monkeypatch):
    monkeypatch.setattr(seam.metadata, "version", lambda _: text)
    assert seam.version_of("trl") == numbers


def changed_method(*_: Any) -> None:
    pytest.fail("it was called")


@pytest.mark.parametrize("method", ["_compute_loss", "_generate_and_score_completions"])
def test_a_method_with_other_parameters_is_refused(method, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, method, changed_method)
    with pytest.raises(EngineError, match=rf"GRPOTrainer.{method} must take .*'inputs'.*trustrl.policy_loss"):
        world.ours(regions.PPO())


@pytest.mark.parametrize("method", ["_compute_loss", "_generate_and_score_completions"])
def test_a_method_that_is_gone_is_refused(method, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, method)
    with pytest.raises(EngineError, match=rf"GRPOTrainer.{method} does not exist"):
        world.ours(regions.PPO())


def test_the_mixin_alone_is_refused():
    class Mine(TrustRegionMixin):
        pass

    with pytest.raises(
        ConfigError,
        match=r"before a GRPOTrainer in a class's bases, got Mine.*class Mine\(TrustRegionMixin, MyGRPOTrainer\)",
    ):
        Mine(region=regions.PPO())


class Negated(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return -super()._compute_loss(model, inputs)


class Infinite(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) - inputs["advantages"][0, 0] * math.inf


class Deaf(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs | {"advantages": torch.ones(6)})


class Twice(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + super()._compute_loss(model, inputs)


class Unmasked(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) - inputs["advantages"].sum()


class Unfused(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return model(input_ids=inputs["completion_ids"]).logits.sum()


LOSSES = {
    Negated: ["multiply tokens in the loss by numbers ≥ 0"],
    Infinite: ["multiply tokens in the loss by numbers ≥ 0"],
    Unmasked: ["the others by 0"],
    Deaf: ["must depend on inputs['advantages']"],
    Twice: ["_get_per_token_logps_and_entropies(model, ...) exactly once, got 2 calls"],
    Unfused: ["_get_per_token_logps_and_entropies(model, ...) exactly once, got 0 calls"],
}


@pytest.mark.parametrize("base", LOSSES, ids=lambda base: base.__name__)
def test_a_subclass_whose_loss_is_not_trls_is_told_what_its_loss_did(base):
    """And not to install another TRL, which is not at fault."""
    cls = type("Mine", (TrustRegionMixin, base), {})
    trainer = world.trainer_of(cls, world.tiny_model(), world.settings(), region=regions.PPO(), behavior="trainer")
    with pytest.raises(EngineError) as error:
        trainer._compute_loss(trainer.model, world.batch(trainer.model))
    for part in [f"{base.__name__}._compute_loss must", *LOSSES[base], "super()._compute_loss", "trustrl.policy_loss"]:
        assert part in str(error.value)
    assert "Install" not in str(error.value)


class InFront(TrustRegionGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return GRPOTrainer._compute_loss(self, model, inputs)


class InFrontOfAll(TrustRegionGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return GRPOTrainer._compute_loss(self, model, inputs)


@pytest.mark.parametrize("cls", [InFront, InFrontOfAll])
def test_a_subclass_that_never_calls_the_regions_loss_is_stopped_after_one_step(cls):
    trainer = world.trainer_of(
        cls, world.tiny_model(), world.settings(max_steps=3), region=regions.PPO(), behavior="trainer"
    )
    with pytest.raises(EngineError, match=rf"it never ran. {cls.__name__} overrides .*Call super\(\) in it"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_subclass_whose_rollout_lacks_something_is_told_so():
    class Lacking(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            del rollout["prompt_mask"]
            return rollout

    cls = type("Mine", (TrustRegionMixin, Lacking), {})
    trainer = world.trainer_of(
        cls, world.tiny_model(), world.settings(max_steps=1), region=regions.PPO(), behavior="trainer"
    )
    with pytest.raises(
        EngineError, match=r"Lacking._generate_and_score_completions must carry prompt_mask, got .*everything that TRL"
    ):
        trainer.train()


@pytest.mark.parametrize("name", engine.NEEDED_INPUTS)
def test_a_rollout_without_what_the_loss_needs_is_refused(name, monkeypatch):
    trainer = world.ours(regions.PPO())
    inputs = world.batch(trainer.model)
    inputs[name] = None
    with pytest.raises(EngineError, match=f"TRL's rollout must carry {name}, got .*Install a TRL version"):
        trainer._compute_loss(trainer.model, inputs)
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda *_: inputs)
    with pytest.raises(EngineError, match=f"TRL's rollout must carry {name}"):
        trainer._generate_and_score_completions([])


def test_a_subclass_of_ones_own_keeps_its_own_term():
    """Its loss, and its gradient beside the region's."""

    class Regularised(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 0.1 * model.lm_head.weight.square().sum()

    class Mine(TrustRegionMixin, Regularised):
        pass

    args = [world.tiny_model(), world.settings()]
    mine = world.trainer_of(Mine, *args, region=regions.PPO(), behavior="trainer", startup_checks=False)
    inputs = world.batch(mine.model)
    found, alone = world.result(mine, inputs), world.result(world.ours(regions.PPO()), inputs)
    wanted = alone.gradient | {"lm_head.weight": alone.gradient["lm_head.weight"] + 0.2 * mine.model.lm_head.weight}
    assert 0.05 < found.metrics["trustrl/masked_share"] < 0.6
    assert world.error(found.gradient, wanted) <= 1e-6
    assert world.error(found.gradient, alone.gradient) > 0.1


# ── before the first step ───────────────────────────────────────────────────────────────────────────────────────────


def fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch as recorded at the weights the trainer has now."""
    return inputs | {"trustrl_version": torch.zeros_like(inputs["completion_ids"])}


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_an_anchor_that_is_not_the_policy_at_its_own_weights_is_refused(anchor):
    trainer = world.ours(regions.PPO(anchor=anchor), given={"startup_checks": True})
    with pytest.raises(EngineError) as error:
        trainer._compute_loss(trainer.model, fresh(world.batch(trainer.model)))
    for part in ("ratio π/b must be 1", "trainer's log-probs", "a different temperature", "startup_checks=False"):
        assert part in str(error.value)


def test_the_right_anchor_passes_once_and_is_not_looked_at_again():
    trainer = world.ours(regions.PPO(), given={"startup_checks": True})
    right = fresh(world.batch(trainer.model, noise=0.0))
    assert trainer._compute_loss(trainer.model, right).isfinite()
    assert trainer._compute_loss(trainer.model, fresh(world.batch(trainer.model))).isfinite()


@pytest.mark.parametrize("why", ["switched off", "older weights"])
def test_an_anchor_is_not_compared_where_it_need_not_agree(why):
    trainer = world.ours(regions.PPO(), given={"startup_checks": why != "switched off"})
    inputs = world.batch(trainer.model)
    inputs = fresh(inputs) if why == "switched off" else inputs
    assert trainer._compute_loss(trainer.model, inputs).isfinite()


@pytest.mark.parametrize(
    ("gap", "behavior", "anchor", "refused"),
    [
        pytest.param(0.01, "trainer", "behavior", False, id="one network run twice"),
        pytest.param(0.1, "trainer", "behavior", True, id="too far for one network"),
        pytest.param(0.1, "sampler", "behavior", False, id="two implementations"),
        pytest.param(0.1, "sampler", "proximal", True, id="the trainer's own, beside a sampler"),
        pytest.param(0.2, "sampler", "behavior", True, id="too far for two implementations"),
    ],
)
def test_how_far_the_same_weights_may_differ(gap, behavior, anchor, refused):
    logp = -torch.ones(2, 3)
    recorded = {"behavior_logp": logp - gap, "proximal_logp": logp - gap}
    other = "proximal_logp" if anchor == "behavior" else "behavior_logp"
    recorded[other] = logp - 9  # must not be looked at
    rollout = trustrl.RolloutTokens(
        advantage=torch.ones(2),
        in_loss=torch.ones(2, 3).bool(),
        version=torch.zeros(2, 3, dtype=torch.long),
        **recorded,
    )
    policy = trustrl.PolicyTokens(logp=logp, version=0)
    if refused:
        with pytest.raises(EngineError, match="got a mean .* of " + re.escape(f"{gap:.3g}")):
            check_first_loss(policy, rollout, anchor, behavior)
    else:
        check_first_loss(policy, rollout, anchor, behavior)


class Sampling:
    """A vLLM that follows the trainer's weights, or not."""

    def __init__(self, weight: torch.Tensor, *, follows: bool, asleep: bool = False) -> None:
        self.enable_sleep_mode = asleep
        self.mode, self.syncs, self.own, self.weight, self.follows = "colocate", 0, weight.clone(), weight, follows

    def sync_weights(self) -> None:
        self.syncs += 1
        if self.follows:
            self.own = self.weight.detach().clone()

    def gap(self) -> torch.Tensor:
        return 0.01 + (self.own - self.weight.detach()).abs()


@pytest.mark.parametrize("follows", [True, False])
def test_a_sampler_that_does_not_follow_the_weights_is_refused(follows, monkeypatch):
    monkeypatch.setattr("trustrl.engines.vllm.weight_reload.probe_gap", lambda generation: generation.gap())
    model = world.tiny_model()
    before = model.lm_head.weight.detach().clone()
    generation = Sampling(model.lm_head.weight, follows=follows)
    trainer = SimpleNamespace(model=model, vllm_generation=generation, accelerator=SimpleNamespace(state=None))
    check = callbacks.FollowsTheTrainer(trainer)
    if follows:
        check.on_train_begin(None, None, None)
    else:
        with pytest.raises(EngineError) as error:
            check.on_train_begin(None, None, None)
        for part in ("sampler must follow the trainer's weights", "tied embeddings", "startup_checks=False"):
            assert part in str(error.value)
    assert torch.equal(model.lm_head.weight, before)
    assert torch.equal(generation.own, before)
    assert generation.syncs == 3


def test_a_sleeping_sampler_is_not_asked_whether_it_follows():
    model = world.tiny_model()
    generation = Sampling(model.lm_head.weight, follows=False, asleep=True)
    trainer = SimpleNamespace(model=model, vllm_generation=generation, accelerator=SimpleNamespace(state=None))
    callbacks.FollowsTheTrainer(trainer).on_train_begin(None, None, None)
    assert generation.syncs == 0


# ── the sampler ─────────────────────────────────────────────────────────────────────────────────────────────────────


def with_server(**more: Any) -> SimpleNamespace:
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "raw_logprobs"}})
    generation = SimpleNamespace(mode="server", enable_sleep_mode=False, vllm_client=client)
    usual = {
        "use_vllm": True, "vllm_generation": generation, "temperature": 1.0, "region": regions.DPPO(),
        "accelerator": SimpleNamespace(is_main_process=True),
    }  # fmt: skip
    return SimpleNamespace(**usual | more)


def test_a_server_with_raw_log_probs_is_refused_at_another_temperature():
    sampler.prepare(with_server(), Wanted())
    with pytest.raises(ConfigError, match=r"logprobs_mode must be 'processed_logprobs'.*--logprobs-mode"):
        sampler.prepare(with_server(temperature=0.7), Wanted())


@pytest.mark.parametrize("preset", ["dppo-binary-tv", "dppo-topk-tv"])
def test_a_sampler_that_sleeps_is_not_refused_because_it_need_not_score_again(preset):
    check_settings(settings(**VLLM, vllm_enable_sleep_mode=True), trustrl.preset(preset), "sampler")


def test_speculative_decoding_is_refused_on_a_cpu_alone():
    """The installed vLLM says which: `vllm_on_cpu` is what the trainer asks it."""
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    check_settings(settings(**VLLM), regions.PPO(), "sampler", vllm_options=drafts, vllm_on_cpu=False)
    with pytest.raises(ConfigError, match=r"vllm_options\['speculative_config'\] must be left out .*NaN log-probs"):
        check_settings(settings(**VLLM), regions.PPO(), "sampler", vllm_options=drafts, vllm_on_cpu=True)


# ── the table of refusals ───────────────────────────────────────────────────────────────────────────────────────────

WORKS = {"trl": (1, 16, 0), "loss_type": "grpo", "behavior": "trainer", "use_vllm": False}


@pytest.mark.parametrize("case", cases(ROWS, TRL), ids=lambda case: f"{case.row.setting}: {case.row.must_be}")
def test_a_row_of_the_table_refuses_its_example_and_no_other_row_does(case):
    row, region = case.row, trustrl.preset(case.preset, **case.region)
    facts = WORKS | {"region": region} | case.settings

    def given(name, default=None):
        return default if facts.get(name) is None else facts[name]

    refusing = []
    for other in ROWS:
        try:
            other.check(given, region)
        except ConfigError as error:
            refusing.append((other, str(error)))
    assert [other for other, _ in refusing] == [row]


def test_log_probs_the_sampler_did_not_record_are_never_replaced():
    trainer = world.ours(regions.PPO(), given={"behavior": "trainer"})
    trainer._recorder.behavior = "sampler"
    inputs = world.batch(trainer.model)
    del inputs["sampling_per_token_logps"]
    with pytest.raises(MissingDataError, match=r"sampler must record .*anchor='proximal'"):
        trainer._recorder.record(trainer.model, inputs, version=0, rows=6)
