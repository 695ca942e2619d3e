"""What the adapter relies on in TRL: changes are refused with a sentence, and what TRL gives today is written down."""

import ast
import inspect
import textwrap
from importlib import metadata

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from trustrl.engines.common import seam
from trustrl.engines.trl import trainer as adapter
from trustrl.errors import EngineError

SAMPLED = trustrl.preset("dppo-binary-tv")
TOPK = trustrl.preset("dppo-topk-tv")
COMPUTE_LOSS = GRPOTrainer._compute_loss
ROLL_OUT = GRPOTrainer._generate_and_score_completions
needs_fused_head = pytest.mark.skipif(seam.version_of("trl") < (1, 15), reason="no fused output layer before 1.15")


def loss_with(monkeypatch, theirs, *, training=True):
    """Our loss on one batch, where `theirs` has taken the place of TRL's."""
    trainer = world.ours(SAMPLED, given={"startup_checks": True})
    trainer.model.train(training)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", theirs)
    with torch.set_grad_enabled(training):
        return trainer._compute_loss(trainer.model, world.batch(trainer.model))


# ── start-up: the methods we override ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("calls", [False, True])
def test_a_fake_of_unsloths_trainer_is_refused_if_its_loss_does_not_call_the_seam(calls):
    class UnslothGRPOTrainer(GRPOTrainer):
        def own_clip(self, model, inputs, *args, **kwargs): ...

        def through_the_seam(self, model, inputs, *args, **kwargs):
            return self._compute_loss(model, inputs)

        compute_loss = through_the_seam if calls else own_clip

    class Mine(adapter.TrustRegionMixin, UnslothGRPOTrainer):
        pass

    if calls:
        world.trainer_of(Mine, world.tiny_model(), world.settings(num_iterations=2), region=SAMPLED, behavior="trainer")
    else:
        with pytest.raises(EngineError, match=r"and UnslothGRPOTrainer\.compute_loss, which unsloth put in its place"):
            Mine(model=None, reward_funcs=None, region=SAMPLED)


def test_another_signature_of_the_loss_is_refused_when_a_trainer_is_made(monkeypatch):
    def changed(self, model, inputs, num_items_in_batch):
        raise AssertionError("never called")

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", changed)
    with pytest.raises(EngineError) as caught:
        world.ours(SAMPLED)
    assert str(caught.value) == (
        "GRPOTrainer._compute_loss must take ('self', 'model', 'inputs'), got ('self', 'model', 'inputs', "
        "'num_items_in_batch'). This adapter was written for a different version of trl than the installed "
        f"{metadata.version('trl')}. Install a version listed in trustrl's documentation, or call "
        "`trustrl.policy_loss` from your own trainer."
    )


def test_another_signature_of_the_rollout_is_refused_when_a_trainer_is_made(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs, tools: None)
    with pytest.raises(
        EngineError, match=r"_generate_and_score_completions must take \('self', 'inputs'\), got .*tools"
    ):
        world.ours(SAMPLED)


@pytest.mark.parametrize(
    "method", ["_compute_loss", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"]
)
def test_a_method_that_is_gone_is_refused_when_a_trainer_is_made(monkeypatch, method):
    monkeypatch.delattr(GRPOTrainer, method)
    with pytest.raises(EngineError, match=f"GRPOTrainer.{method} does not exist"):
        world.ours(SAMPLED)


OLDER = {
    "a region on the sampled token": (
        SAMPLED, "0.29.1",
        "trl must be at least 1.0, got 0.29.1: trustrl was not tested with older versions. "
        'Run `pip install "trl>=1.0"`.',
    ),
    "a region on the top K": (
        TOPK, "1.8.0",
        "trl must be at least 1.9, got 1.8.0: Top-K and TROLL were not tested with older versions. "
        'Run `pip install "trl>=1.9"`.',
    ),
    "an exact region": (
        trustrl.preset("dppo-full-tv"), "1.14.2",
        "trl must be at least 1.15, got 1.14.2: exact regions were not tested with older versions. "
        'Run `pip install "trl>=1.15"`.',
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLDER)
def test_an_older_version_is_refused_with_the_command_that_helps(monkeypatch, kind):
    region, version, says = OLDER[kind]
    monkeypatch.setattr(seam.metadata, "version", lambda package: version)
    with pytest.raises(EngineError) as caught:
        world.ours(region)
    assert str(caught.value) == says


@pytest.mark.parametrize("version", ["1.0", "1.0.0", "1.9.2", "1.16.0.dev0", "2.0.0rc1"])
def test_versions_from_the_oldest_on_are_accepted(monkeypatch, version):
    monkeypatch.setattr(seam.metadata, "version", lambda package: version)
    seam.require_version("trl", adapter.OLDEST, "any reason")


# ── the loss: how TRL calls the model, and what its loss depends on ─────────────────────────────────────────────────


def test_a_second_model_call_inside_trls_loss_is_refused(monkeypatch):
    def twice(self, model, inputs):
        return COMPUTE_LOSS(self, model, inputs) + COMPUTE_LOSS(self, model, inputs)

    with pytest.raises(EngineError, match=r"TRL's loss must compute .* exactly once, got 2 calls. Install a TRL"):
        loss_with(monkeypatch, twice)


def test_a_loss_that_never_calls_the_model_is_refused(monkeypatch):
    def elsewhere(self, model, inputs):
        return inputs["advantages"].sum()

    with pytest.raises(EngineError, match=r"TRL's loss must compute .* exactly once, got 0 calls. Install a TRL"):
        loss_with(monkeypatch, elsewhere)


@pytest.mark.parametrize(
    "given", [{}, {"labels": None}, {"fused_lm_head": True}, {"labels": None, "fused_lm_head": False}],
    ids=["logits", "labels alone", "no labels", "fused head turned off"],
)  # fmt: skip
@needs_fused_head
def test_a_trl_that_asks_the_model_for_something_else_is_refused_where_the_vocabulary_is_needed(monkeypatch, given):
    def unfused(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **more):
        return model(input_ids=input_ids, **{k: input_ids if k == "labels" else x for k, x in given.items()})

    trainer = world.ours(TOPK)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", unfused)
    with pytest.raises(
        EngineError, match=r"must call the model with `labels` and `fused_lm_head=True`, got .*input_ids"
    ):
        trainer._compute_loss(trainer.model, world.batch(trainer.model))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_loss_that_no_longer_depends_on_the_advantages_is_refused(monkeypatch, training):
    def precomputed(self, model, inputs):
        return COMPUTE_LOSS(self, model, inputs | {"advantages": inputs["advantages"].detach()})

    with pytest.raises(EngineError, match=r"TRL's loss must depend on inputs\['advantages'\], and it does not"):
        loss_with(monkeypatch, precomputed, training=training)


@pytest.mark.parametrize(
    "weigh",
    [
        pytest.param(lambda on: torch.ones_like(on), id="padding counts"),
        pytest.param(lambda on: 2 * on, id="the sign is turned"),
        pytest.param(lambda on: on / 0, id="infinite"),
    ],
)
def test_a_reduction_with_impossible_weights_is_refused_at_the_first_loss(monkeypatch, weigh):
    def strange(self, model, inputs):
        weights = weigh(inputs["completion_mask"].float())
        return COMPUTE_LOSS(self, model, inputs) + (weights * inputs["advantages"]).sum()

    with pytest.raises(EngineError, match="must multiply tokens in the loss by numbers ≥ 0 and the others by 0"):
        loss_with(monkeypatch, strange)


@pytest.mark.parametrize(
    "region", [SAMPLED, pytest.param(TOPK, marks=needs_fused_head)], ids=["TRL's head", "our head"]
)
def test_an_empty_first_micro_batch_is_no_reason_to_stop(region):
    """`mask_truncated_completions` makes one where no completion has ended."""
    trainer = world.ours(region, given={"startup_checks": True})
    inputs = world.batch(trainer.model)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    trainer._compute_loss(trainer.model, inputs).backward()
    assert world.gradients(trainer).keys() == dict(trainer.model.named_parameters()).keys(), "DDP waits for all of them"
    assert all(not gradient.any() for gradient in world.gradients(trainer).values())
    assert trainer._first_loss, "the checks are still to be made, on a micro-batch with tokens"


# ── the data ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", adapter.NEEDED_INPUTS)
def test_a_rollout_without_what_we_read_is_refused(monkeypatch, key):
    def lacking(self, inputs):
        return {name: x for name, x in ROLL_OUT(self, inputs).items() if name != key}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lacking)
    with pytest.raises(EngineError, match=f"TRL's rollout must carry {key}, got .*num_items_in_batch"):
        world.ours(SAMPLED, max_steps=1, num_generations=2).train()


@pytest.mark.parametrize("key", adapter.NEEDED_INPUTS)
def test_a_micro_batch_without_what_we_read_is_refused(key):
    trainer = world.ours(SAMPLED)
    inputs = world.batch(trainer.model) | {key: None}
    with pytest.raises(EngineError, match=f"TRL's rollout must carry {key}, got"):
        trainer._compute_loss(trainer.model, inputs)


@needs_fused_head
def test_what_we_add_to_a_rollout_stays_with_its_tokens():
    """TRL shuffles and splits a rollout: the top-K of a row must arrive with the row it was recorded for."""
    seen = []

    class Watching(adapter.TrustRegionGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    world.trainer_of(
        Watching,
        world.tiny_model(),
        world.settings(max_steps=3, steps_per_generation=3),
        region=TOPK,
        behavior="trainer",
    ).train()
    assert len(seen) == 3
    for inputs in seen:
        sampled = world.laid_out(inputs, "trustrl_topk_ids", -1) == inputs["completion_ids"].unsqueeze(-1)
        assert sampled.any(-1).float().mean() > 0.3
        expected = inputs["old_per_token_logps"].unsqueeze(-1).expand(sampled.shape)[sampled]
        logp = world.laid_out(inputs, "trustrl_topk_logp")[sampled]
        torch.testing.assert_close(logp, expected, rtol=1e-4, atol=1e-4)


# ── what TRL gives today ────────────────────────────────────────────────────────────────────────────────────────────

ROLLOUT = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
READ_BY_THE_LOSS = ROLLOUT | {
    "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps", "tool_mask",
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
}  # fmt: skip
SETTINGS_OF_THE_LOSS = {
    "args.delta", "args.entropy_coef_delta", "args.entropy_coef_max", "args.entropy_coef_min", "args.entropy_target",
    "args.sapo_temperature_neg", "args.sapo_temperature_pos", "args.steps_per_generation", "args.use_bias_correction_kl",
    "args.vespo_k_neg", "args.vespo_k_pos", "args.vespo_lambda_neg", "args.vespo_lambda_pos", "aux_loss_enabled", "beta",
    "current_gradient_accumulation_steps", "entropy_coef", "epsilon_high", "epsilon_low", "importance_sampling_level",
    "loss_type", "max_completion_length", "off_policy_mask_threshold", "router_aux_loss_coef", "top_entropy_quantile",
    "use_adaptive_entropy", "use_vllm", "vllm_importance_sampling_correction",
}  # fmt: skip
MODEL_CALL = {"input_ids", "attention_mask", "labels", "fused_lm_head"}
LOSS_METRICS = {"entropy"} | {
    f"clip_ratio/{x}" for x in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}


def check_known(what, found, known, look_at):
    new, gone = sorted(set(found) - known), sorted(known - set(found))
    assert not new + gone, (
        f"TRL {metadata.version('trl')} changed {what}. New: {new}. Gone: {gone}. Look at {look_at}, decide what it means "
        "for a region, then write it down in this file."
    )


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param({}, set(), id="on-policy"),
        pytest.param({"num_iterations": 2}, {"old_per_token_logps"}, id="several updates a rollout"),
        pytest.param({"beta": 0.1}, {"ref_per_token_logps"}, id="with a reference model"),
    ],
)
def test_a_rollout_and_a_micro_batch_carry_what_is_written_down(monkeypatch, settings, more):
    rollouts, batches = [], []

    def watched_rollout(self, inputs):
        rollouts.append(ROLL_OUT(self, inputs))
        return rollouts[-1]

    def watched_loss(self, model, inputs):
        batches.append(inputs)
        return COMPUTE_LOSS(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched_rollout)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watched_loss)
    world.stock(max_steps=1, **settings).train()
    look_at = "NEEDED_INPUTS in engines/trl/trainer.py and engines/trl/anchors.py"
    check_known("what a rollout carries", rollouts[0], ROLLOUT | more, look_at)
    check_known("what a micro-batch carries", batches[0], ROLLOUT | more, look_at)
    ids = batches[0]["completion_ids"]
    assert ids.shape == batches[0]["completion_mask"].shape
    assert batches[0]["advantages"].shape in (ids.shape[:1], ids.shape)


def named_in(method):
    """What a method's source reads of `self`, and of `inputs` by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    settings, keys = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr="args"), attr=name):
                settings.add(f"args.{name}")
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                settings.add(name)
            case ast.Subscript(value=ast.Name(id="inputs"), slice=ast.Constant(value=name)):
                keys.add(name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="inputs"), attr="get"), args=[ast.Constant(value=name), *_]
            ):
                keys.add(name)
            case ast.Compare(left=ast.Constant(value=name), comparators=[ast.Name(id="inputs")]):
                keys.add(name)
    return settings, keys


def test_trls_loss_reads_the_inputs_and_settings_that_are_written_down():
    """A setting TRL's loss begins to read may change the policy term, which a region replaces."""
    settings, keys = named_in(COMPUTE_LOSS)
    machinery = {
        "args", "accelerator", "model", "_metrics", "_get_per_token_logps_and_entropies", "get_high_entropy_mask",
        "get_off_policy_mask", "get_gamma_weights", "_entropy_bonus_enabled", "_last_world_entropy", "_entropy_window_stats",
    }  # fmt: skip
    check_known("the inputs its loss reads", keys, READ_BY_THE_LOSS, "`_trl_loss_parts` in engines/trl/trainer.py")
    check_known(
        "what its loss reads of the trainer",
        settings,
        SETTINGS_OF_THE_LOSS | machinery,
        "engines/trl/trainer_checks.py",
    )


def test_trls_loss_calls_the_model_and_logs_as_written_down():
    """Metrics of its policy term would show advantages of 0: we replace those that are known."""
    trainer = world.stock()
    calls = []

    class Called:
        def __call__(self, *args, **kwargs):
            assert not args
            calls.append(set(kwargs))
            return trainer.model(**kwargs)

    inputs = world.batch(trainer.model)
    trainer.model.train()
    trainer._metrics["train"].clear()
    COMPUTE_LOSS(trainer, Called(), inputs)
    assert len(calls) == 1
    check_known(
        "how its loss calls the model",
        calls[0],
        MODEL_CALL,
        "engines/trl/anchors.py and engines/common/vocabulary_forward.py",
    )
    check_known("what its loss logs", trainer._metrics["train"], LOSS_METRICS, "engines/common/step_metrics.py")
