"""A vLLM server in a process of its own, reached over loopback: scoring, and weights over gloo."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource

from support.tiny_models import LONGEST, full_logps, perturb, save_model, some_sequences
from trustrl.engines.vllm.clients import ServerClient
from trustrl.engines.vllm.gloo_transfer import BACKEND, EXTENSION, GlooTrainerInitInfo
from trustrl.engines.vllm.scoring import score_on_server, score_rollout
from trustrl.errors import ConfigError, EngineError

EXACT = 1e-4

pytestmark = pytest.mark.xdist_group("server")
SEQUENCES, PROMPT_LENGTHS = some_sequences(30, 6, 12), [3, 2, 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, trainer's model); tied, so that a stale head would show."""
    path = tmp_path_factory.mktemp("served")
    save_model(path, tied=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "--host": "127.0.0.1", "--port": port, "--model": path, "--dtype": "float32", "--max-model-len": LONGEST,
        "--kv-cache-memory-bytes": 1 << 26, "--max-logprobs": 64, "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{BACKEND}"}}', "--worker-extension-cls": EXTENSION,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(word) for pair in options.items() for word in pair]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # a server's engine always has its own process
    log = path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process, log)
        yield address, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    finally:
        process.terminate()
        process.wait(30)


def wait_for(address, process, log, seconds=300):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"The server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture
def client(server):
    return VLLMClient(base_url=server[0])


def gap(client, model):
    """|server − transformers|, at the tokens and at the top 8."""
    scores = score_on_server(client, SEQUENCES, PROMPT_LENGTHS, k=8)
    assert scores.valid.sum(-1).tolist() == [27, 4, 0]
    found = []
    for row, (ids, start) in enumerate(zip(SEQUENCES, PROMPT_LENGTHS, strict=True)):
        truth = full_logps(model, ids)[start - 1 :]
        length = len(truth)
        own = truth.gather(-1, torch.tensor(ids[start:], dtype=torch.int64)[:, None])
        found += [(scores.logp[row, :length, None] - own).abs().flatten()]
        found += [(scores.top_logp[row, :length] - truth.topk(8).values).abs().flatten()]
        assert (scores.top_ids[row, length:] == -1).all()
    return torch.cat(found).max()


def test_weights_cross_to_another_process_and_none_stays_behind(server, client):
    address, model = server
    assert gap(client, model) < EXACT
    sender = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo(rank=0), client=ServerClient(address), source=ModuleSource(model)
    )
    for version in ("one", "two"):
        (prompt,) = some_sequences(LONGEST - 8)
        client.generate([prompt], max_tokens=1)  # fills the prefix cache
        perturb(model)
        assert gap(client, model) > 0.1
        start = time.perf_counter()
        sender.send_weights(version)
        print(f"sent in {(time.perf_counter() - start) * 1e3:.0f} ms")
        assert gap(client, model) < EXACT
        answer = client.generate([prompt], max_tokens=1, logprobs=0)
        token, logp = answer["completion_ids"][0][0], answer["logprobs"][0][0][0]
        assert logp == pytest.approx(full_logps(model, [*prompt, token])[-1, token].item(), abs=EXACT)
    sender.shutdown()


def test_a_server_not_started_for_this_k_is_named(client):
    with pytest.raises(ConfigError, match=r"k must be at most the server's max_logprobs, got 65.*--max-logprobs 65"):
        score_on_server(client, SEQUENCES, PROMPT_LENGTHS, k=65)


def test_only_the_sampled_tokens(client):
    without, with_top = (score_on_server(client, SEQUENCES, PROMPT_LENGTHS, k=k) for k in (0, 3))
    assert without.top_ids.shape == (3, 27, 0)
    torch.testing.assert_close(without.logp, with_top.logp, atol=1e-6, rtol=0)
    assert score_on_server(client, [], [], k=3).top_ids.shape == (0, 0, 3)


def test_trls_server_mode_is_scored_through_its_client(client):
    generation = SimpleNamespace(mode="server", vllm_client=client, accelerator=Accelerator(cpu=True))
    ours = score_rollout(generation, SEQUENCES, PROMPT_LENGTHS, k=3)
    direct = score_on_server(client, SEQUENCES, PROMPT_LENGTHS, k=3)
    torch.testing.assert_close(ours.top_logp, direct.top_logp, atol=1e-5, rtol=0)


def test_other_faults_of_a_server_keep_their_own_words(client):
    with pytest.raises(Exception, match=str(LONGEST)):
        score_on_server(client, some_sequences(LONGEST + 5), [1], k=1)


def test_a_server_without_its_development_routes_is_named(server):
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        ServerClient(server[0] + "/nowhere").start_weight_update()


def test_what_a_server_refuses_is_passed_on(server):
    with pytest.raises(EngineError, match="/finish_weight_update must succeed, got 500"):
        ServerClient(server[0]).finish_weight_update()
