"""prime-rl's own trainer on a CPU, from its settings and its transport to the weights that it hands to its sampler."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("prime_rl.trainer.rl.loss")

import torch
from safetensors.torch import load_file

from support import prime_rl_on_cpu, regions_oracle as oracle
from support.precision_layouts import on_torchrun

prime_rl_on_cpu.install()

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.transports.rollouts import setup_micro_batch_sender

from support.prime_rl_world import LENGTH, packed, samples
from trustrl.regions.loading import config_to_dict

RATE = 1e-3
CASES = {name: oracle.CASES[name] for name in ("binary on μ", "top-K on μ", "top-K KL on μ", "TROLL on μ")}
OF_VOCABULARY = "trustrl.engines.prime_rl.vocabulary.region_loss"
OF_SAMPLED_TOKENS = "trustrl.engines.prime_rl.region_loss"


class Trained(NamedTuple):
    gradients: list[torch.Tensor]
    """By all parameters, as each optimizer step took it."""

    weights: list[torch.Tensor]
    steps: list[dict[str, Any]]
    logged: dict[str, float]
    """By the last step."""

    num_micro_batches: int


def moved_model(model, folder):
    """The oracle's policy after its update, with its tokenizer, where prime-rl finds it."""
    oracle.model_of(model, oracle.GROWTH).save_pretrained(folder)
    for file in Path(model).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def trained(folder, model, case, *, ranks, rate=RATE, steps=1, words=()):
    """prime-rl's trainer after its steps on the oracle's sequences."""
    sampled = not case.region.needs().topk
    loss = {"type": "custom", "import_path": OF_SAMPLED_TOKENS if sampled else OF_VOCABULARY}
    off = dict.fromkeys(("compile", "ac", "ac_offloading"))
    settings = {
        "model": {
            "name": moved_model(model, folder / "model"), "impl": "hf", "attn": "flash_attention_2", "ep": 1,
            "seq_len": LENGTH, "optim_cpu_offload": False, "fused_lm_head_token_chunk_size": 16, **off,
        },
        "loss": {**loss, "kwargs": config_to_dict(case.region)}, "optim": {"lr": rate},
        "rollout_transport": {"type": "filesystem"}, "monitors": {"file": {}}, "output_dir": str(folder / "run"),
        "max_steps": steps, "dist_timeout_seconds": 120, "matmul_precision": "highest",
    }  # fmt: skip
    grid = packed(samples(model, lambda record, before: None) if sampled else samples(model), ranks)
    transport = TrainerConfig.model_validate(settings).rollout_transport
    asyncio.run(setup_micro_batch_sender(folder / "run", ranks, 1, transport).send(grid))
    (folder / "settings.json").write_text(json.dumps(settings))
    on_torchrun("prime_rl_worker.py", ranks, [folder / "settings.json", folder, *words])
    logged = {}
    for line in (folder / "run/metrics.jsonl").read_text().splitlines():
        logged |= json.loads(line)
    vectors = [
        [flat(folder / f"{what}_{step}.safetensors") for step in range(steps)] for what in ("gradient", "weights")
    ]
    return Trained(*vectors, json.loads((folder / "steps.json").read_text()), logged, sum(map(len, grid)))


def flat(file):
    tensors = load_file(file)
    return torch.cat([tensors[str(at)].flatten() for at in range(len(tensors))])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", CASES)
def test_prime_rls_trainer_takes_an_optimizer_step_with_the_clipped_gradient_of_a_direct_computation(
    name, model, tmp_path
):
    run = trained(tmp_path, model, CASES[name], ranks=2)
    wanted = oracle.expected(model, 1, CASES[name])
    assert run.logged["loss/mean"] * run.num_micro_batches == pytest.approx(wanted.loss, rel=0, abs=1e-5)
    norm = wanted.gradient.norm().item()
    assert run.logged["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1  # prime-rl clips
    error = (run.gradients[0] - wanted.gradient / norm).abs().max() / (wanted.gradient / norm).abs().max()
    assert error <= 1e-5
    start = {name: p.detach() for name, p in oracle.model_of(model, oracle.GROWTH).named_parameters()}
    before = torch.cat([p.flatten() for p in start.values()])
    changed = (run.weights[0] - before).abs()
    assert changed.max().item() == pytest.approx(RATE, rel=0.02)  # AdamW's first step
    assert (changed > 0).float().mean() > 0.5
    files = (tmp_path / "run/broadcasts/step_1").glob("*.safetensors")
    sent = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    assert torch.equal(torch.cat([sent[name].flatten() for name in start]), run.weights[0].bfloat16().float())


@pytest.mark.parametrize("name", ["top-K on μ", "top-K KL on μ", "TROLL on μ"])
def test_a_policy_against_itself_in_prime_rls_bf16_has_no_divergence(name, model, tmp_path):
    run = trained(tmp_path, model, CASES[name], ranks=1, rate=0.0, steps=2, words=("again",))
    assert torch.equal(*run.weights)
    other, itself = run.steps
    assert other["log_ratio"] > 0.1  # the oracle's sampler is another policy
    assert itself == {"log_ratio": 0.0, "top": 0.0, "masked": 0, "tokens": other["tokens"]}
    assert run.logged["is_masked/mean"] == 0
