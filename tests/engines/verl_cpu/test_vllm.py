"""The vLLM sampler, in its own environment but without Ray, against transformers' softmax in this one."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from support.tiny_models import full_logps, perturb, save_model, some_sequences
from trustrl.engines.common.sampler_fields import TOPK, TOPK_IDS, TOPK_LOGP
from trustrl_verl_cpu.vllm_server import VARIABLE, runtime_env

EXACT = 1e-4
TEMPERATURE = 0.7
WIDTHS = (0, 5, 64, 1)
PYTHON = os.environ.get(VARIABLE)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(tied, id=name, marks=pytest.mark.xdist_group(f"vllm server, {name}"))
        for name, tied in (("untied", False), ("tied", True))
    ],
)
def run(request, tmp_path_factory):
    """One start of vLLM: two sets of weights, and under each samples and scores asked for at once."""
    if not PYTHON:
        pytest.skip(f"{VARIABLE} is not set")
    folder = tmp_path_factory.mktemp("vllm")
    save_model(folder / "model", tied=request.param)
    models = [AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2)]
    torch.manual_seed(1)
    perturb(models[1])
    for step, model in enumerate(models):
        save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, folder / f"{step}")
    sequences = some_sequences(3, 150, 11, 2)  # a block of vLLM's prefix cache holds up to 128 tokens
    sampled = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    scored = {"max_tokens": 1, "temperature": 1.0, "detokenize": False}
    calls = [
        (s, sampled | {"ignore_eos": True} | ({"extra_args": {TOPK: k}} if k else {}))
        for s, k in zip(sequences, WIDTHS, strict=True)
    ]
    calls += [(s, scored | {"prompt_logprobs": k}) for k in (0, 8, 64) for s in sequences]
    job = {
        "model": str(folder / "model"), "weights": [str(folder / "0"), str(folder / "1")], "calls": calls,
        "out": str(folder / "found.json"),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | runtime_env(None)["env_vars"] | {"HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("vllm_server_run.py")
    done = subprocess.run(
        [PYTHON, str(script), str(folder / "job.json")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return models, calls, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("step", [0, 1], ids=["first weights", "second weights"])
def test_samples_carry_the_log_probs_they_were_drawn_with(run, step):
    models, calls, found = run
    for (ids, how), (tokens, logps, extra) in zip(calls, found["answers"][step], strict=True):
        assert extra["global_steps"] == step
        if "prompt_logprobs" in how:
            assert tokens == []
            continue
        assert len(tokens) == len(logps) == 8
        logits = full_logps(models[step], ids + tokens)[len(ids) - 1 :]
        truth = torch.log_softmax(logits / TEMPERATURE, -1)[torch.arange(8), tokens]
        torch.testing.assert_close(torch.tensor(logps), truth, atol=EXACT, rtol=0)


@pytest.mark.parametrize("step", [0, 1], ids=["first weights", "second weights"])
def test_the_most_probable_ids_come_with_the_tokens(run, step):
    models, calls, found = run
    for (ids, _), (tokens, _, extra), k in zip(calls[:4], found["answers"][step][:4], WIDTHS, strict=True):
        assert (TOPK_IDS in extra) == bool(k)
        if k:
            logits = full_logps(models[step], ids + tokens)[len(ids) - 1 :]
            truth = torch.log_softmax(logits / TEMPERATURE, -1)
            top_ids, top_logp = torch.tensor(extra[TOPK_IDS]), torch.tensor(extra[TOPK_LOGP])
            torch.testing.assert_close(top_logp, truth.topk(k).values, atol=EXACT, rtol=0)
            torch.testing.assert_close(top_logp, truth.gather(-1, top_ids), atol=EXACT, rtol=0)


@pytest.mark.parametrize("step", [0, 1], ids=["first weights", "second weights"])
def test_scores_follow_verls_contract(run, step):
    models, calls, found = run
    asked = [
        (i, a[2], how["prompt_logprobs"])
        for (i, how), a in zip(calls, found["answers"][step], strict=True)
        if "prompt_logprobs" in how
    ]
    assert len(asked) == 12
    for ids, extra, k in asked:
        found_ids, found_logps = torch.tensor(extra["prompt_ids"]), torch.tensor(extra["prompt_logprobs"])
        assert found_ids.shape == found_logps.shape == (len(ids), max(k, 1))
        truth = full_logps(models[step], ids)
        expected = truth.topk(k).values if k else truth.gather(-1, torch.tensor(ids[1:])[:, None])
        torch.testing.assert_close(found_logps[:-1], expected, atol=EXACT, rtol=0)
        torch.testing.assert_close(truth.gather(-1, found_ids[:-1]), expected, atol=EXACT, rtol=0)
        assert not found_ids[-1].any()
        assert not found_logps[-1].any()


def test_the_two_sets_of_weights_are_far_apart(run):
    """Otherwise weights that never arrived would pass."""
    models, calls, _ = run
    assert max((full_logps(models[0], ids) - full_logps(models[1], ids)).abs().max() for ids, _ in calls) > 0.1


def test_requests_are_answered_together_and_too_many_ids_are_refused(run):
    _, calls, found = run
    assert found["sizes"] == [len(calls), len(calls), 1]
    assert "k must be at most 500, got 501" in found["refused"]
    assert not found["verl"]
