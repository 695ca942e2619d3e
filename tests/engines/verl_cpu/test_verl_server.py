"""verl's own vLLM server class on a real `AsyncLLM`, in vLLM's environment, with the top-K in its answers."""

import importlib.util
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("verl")

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout import replica

from support.tiny_models import full_logps, save_model
from trustrl.engines.common.sampler_fields import TOPK_IDS, TOPK_LOGP
from trustrl.engines.verl import rollout_pieces as server_choice
from trustrl_verl_cpu.vllm_server import VARIABLE, source_root

PYTHON = os.environ.get(VARIABLE)
NEEDED = ("verl", "tensordict", "pyvers", "omegaconf", "antlr4", "codetiming", "orjson", "hydra", "transfer_queue")
"""Packages that verl's server imports and vLLM's environment lacks."""

pytestmark = pytest.mark.xdist_group("recording server")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if not PYTHON:
        pytest.skip(f"{VARIABLE} is not set")
    folder = tmp_path_factory.mktemp("server")
    save_model(folder / "model", tied=False)
    (folder / "packages").mkdir()
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        (folder / "packages" / name).symlink_to(Path(spec.origin).parent)
    described = metadata.distribution("verl").locate_file(f"verl-{metadata.version('verl')}.dist-info")
    (folder / "packages" / described.name).symlink_to(described)
    path = os.pathsep.join([source_root(), str(folder / "packages")])
    script, out = Path(__file__).with_name("verl_server_run.py"), folder / "found.json"
    done = subprocess.run(
        [PYTHON, str(script), str(folder / "model"), str(out)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return AutoModelForCausalLM.from_pretrained(folder / "model"), json.loads(out.read_text())


def test_verl_starts_the_recording_server_under_its_own_name(run):
    _, found = run
    assert found["replica"] == "RecordingReplica"
    assert "vLLMReplica" in found["bases"]


def test_the_registration_leaves_another_plugins_server_alone(monkeypatch):
    def theirs():
        raise AssertionError

    monkeypatch.setitem(replica.RolloutReplicaRegistry._registry, "vllm", theirs)
    server_choice.register_servers()
    assert replica.RolloutReplicaRegistry._registry["vllm"] is theirs
    monkeypatch.setitem(replica.RolloutReplicaRegistry._registry, "vllm", replica._load_vllm)
    server_choice.register_servers()
    assert replica.RolloutReplicaRegistry._registry["vllm"] is server_choice.load_vllm


@pytest.mark.parametrize("k", [3, 64])
def test_the_answers_top_k_is_that_of_the_sampling_distribution(run, k):
    model, found = run
    for i, answer in enumerate(found["asked"][str(k)]):
        ids, logp = np.array(answer["fields"][TOPK_IDS]), np.array(answer["fields"][TOPK_LOGP])
        assert ids.shape == logp.shape == (24, k)
        logits = full_logps(model, [5 + i, 6, 7, *answer["tokens"]])[2:]
        truth = torch.log_softmax(logits / 0.7, -1)
        torch.testing.assert_close(torch.tensor(logp).float(), truth.topk(k).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(logp).float(), truth.gather(-1, torch.tensor(ids)), atol=1e-4, rtol=0)


def test_tokens_and_log_probs_are_those_of_verls_own_server(run):
    _, found = run
    answers = [*found["asked"].values(), found["not asked"], found["stock again"]]
    for rows in answers:
        for ours, theirs in zip(rows, found["stock"], strict=True):
            assert (ours["tokens"], ours["logp"], ours["stop"]) == (theirs["tokens"], theirs["logp"], theirs["stop"])
            assert ours["fields"]["global_steps"] == theirs["fields"]["global_steps"] == 7
    assert found["not asked"] == found["stock"] == found["stock again"]
    assert found["http"] == "list"


def test_an_aborted_request_returns_the_top_k_of_the_tokens_it_sampled(run):
    _, found = run
    answer = found["aborted"]
    assert answer["stop"] == "aborted"
    assert 0 < len(answer["tokens"]) < 240
    assert np.shape(answer["fields"][TOPK_IDS]) == (len(answer["tokens"]), 3)
    assert found["left"] == 0
