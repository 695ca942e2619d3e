"""Mixtures of experts after a reload: the trap without our code, and that ours leaves the sampler equal to the trainer."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from engines.vllm.tiny import logps, perturb, some_sequences
from trustrl.engines.vllm import install_sync, reload as reload_module, score
from trustrl.engines.vllm.reload import begin_reload, end_reload, forget_prefixes, model_runner_of, reloaded

EXACT = 1e-4  # nats, float32
SEQUENCES = some_sequences(12, 30)


@pytest.fixture
def generation(samplers):
    return samplers(tied=False, experts=4)


def gap(generation):
    scores = score(generation.llm, SEQUENCES, [1, 1], k=0)
    return max(
        (scores.logp[row, : len(ids) - 1] - logps(generation.model, ids)).abs().max()
        for row, ids in enumerate(SEQUENCES)
    )


def load(runner, weights):
    for name, weight in weights:
        runner.model.load_weights([(name, weight.data)])


def kernels(model):
    return [method.moe_kernel for method in reload_module._expert_methods(model)]


def test_vllms_own_reload_leaves_experts_unpacked_without_a_word(generation):
    """Should this be gone in a later vLLM, so may its cure."""
    runner = model_runner_of(generation.llm)
    perturb(generation.model)
    initialize_layerwise_reload(runner.model)
    load(runner, generation.model.named_parameters())
    finalize_layerwise_reload(runner.model, runner.model_config)
    forget_prefixes(generation.llm)
    assert gap(generation) > 1
    install_sync(generation)
    generation.sync_weights()
    assert gap(generation) < EXACT


def test_experts_equal_the_trainers_after_every_sync(generation):
    install_sync(generation)
    for _ in range(4):
        perturb(generation.model)
        generation.sync_weights()
        assert gap(generation) < EXACT


def test_experts_that_get_no_new_weights_keep_theirs(generation):
    install_sync(generation)
    generation.sync_weights()
    runner, name = model_runner_of(generation.llm), "model.layers.0.self_attn.o_proj.weight"
    perturb(generation.model, only=name)
    before = kernels(runner.model)
    with reloaded(runner):
        load(runner, [(name, dict(generation.model.named_parameters())[name])])
    forget_prefixes(generation.llm)
    assert kernels(runner.model) == before
    assert gap(generation) < EXACT


def test_a_failing_load_of_experts_leaves_an_engine_that_answers(generation):
    install_sync(generation)
    runner = model_runner_of(generation.llm)
    with pytest.raises(AssertionError, match="Attempted to load weight"), reloaded(runner):
        runner.model.load_weights([("model.norm.weight", torch.ones(3))])
    assert None not in kernels(runner.model)
    assert torch.isfinite(score(generation.llm, SEQUENCES, [1, 1], k=0).logp).all()
    generation.sync_weights()
    assert gap(generation) < EXACT


def test_on_a_gpu_expert_kernels_are_left_alone(generation, monkeypatch):
    """No GPU here: the platform is only called one."""
    install_sync(generation)
    runner = model_runner_of(generation.llm)
    before = kernels(runner.model)
    with monkeypatch.context() as patched:
        patched.setattr(reload_module, "on_cpu", lambda: False)
        begin_reload(runner.model)
        assert kernels(runner.model) == before
        end_reload(runner.model, runner.model_config)
    assert kernels(runner.model) == before
    generation.sync_weights()
    assert gap(generation) < EXACT
