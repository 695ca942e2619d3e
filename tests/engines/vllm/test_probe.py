"""`trustrl probe` with a real vLLM as the sampler, and faults planted in it.

Each probe runs in a process of its own, as a user's would: an engine that ends takes other engines' groups with it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from support.tiny_models import save_model

    folder = tmp_path_factory.mktemp("probe")
    save_model(folder, tied=True)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    from support.tiny_models import save_model

    folder = tmp_path_factory.mktemp("mixture")
    save_model(folder, tied=False, experts=4)
    return folder


def probe(model, *options):
    command = [sys.executable, "-m", "trustrl.cli", "probe", str(model), "--sampler", "vllm", "--json", *options]
    talking = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}  # as vLLM does unless told
    done = subprocess.run(command, env=talking, capture_output=True, text=True, check=False, timeout=900)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)["verdict"]


@pytest.mark.parametrize(
    ("options", "code", "cause"),
    [
        pytest.param(["--dtype", "float32"], 0, "agreement", id="the same precision"),
        pytest.param(["--dtype", "bfloat16"], 0, "rounding", id="bf16"),
        pytest.param(["--dtype", "float32", "--top-k", "20"], 1, "truncation", id="top-k"),
        pytest.param(
            ["--dtype", "float32", "--temperature", "0.7", "--logprobs", "raw"], 1, "raw log-probs", id="raw log-probs"
        ),
    ],
)
def test_a_fault_of_the_sampler_is_named(options, code, cause, model):
    found, verdict = probe(model, *options)
    assert (found, verdict["cause"]) == (code, cause)


@pytest.mark.parametrize(("dtype", "code", "cause"), [("bfloat16", 1, "routing"), ("float32", 0, "agreement")])
def test_a_mixture_of_experts_is_rerouted_by_bf16_and_not_by_float32(dtype, code, cause, mixture):
    """The dense model of the same size is above: bf16 is rounding there."""
    found, verdict = probe(mixture, "--dtype", dtype, "--length", "200")
    print(verdict)
    assert (found, verdict["cause"]) == (code, cause)
    if code:
        assert "of the tokens went to other experts" in verdict["detail"]
