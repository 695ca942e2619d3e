"""The sampler's top-K on its way from a server to verl's workers: whose rows, which temperature, which weights.

The server is made by hand (a table of log-probs) and answers in verl's own contract; real servers are in
tests/engines/verl_cpu.
"""

import asyncio
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from omegaconf import OmegaConf
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

import trustrl
from trustrl.engines.verl import anchors
from trustrl.engines.verl.agent_loop import RecordsTopK, sampled_topk
from trustrl.errors import EngineError

VOCABULARY, K = 12, 4
NEEDS = trustrl.preset("dppo-topk-tv", divergence=trustrl.TopKTV(k=K)).needs()


class TableServer:
    """Scores any sequence with one distribution a position; remembers what it was asked."""

    def __init__(self, global_steps=3):
        make = torch.Generator().manual_seed(0)
        self.logp = torch.randn(32, VOCABULARY, generator=make).log_softmax(-1)
        self.global_steps, self.asked = global_steps, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append(sampling_params)
        k, length = sampling_params["prompt_logprobs"], len(prompt_ids)
        assert sampling_params["max_tokens"] == 1
        rows = self.logp[: length - 1]
        if k:
            top = rows.topk(k, -1)
            ids, logp = top.indices.tolist(), top.values.tolist()
        else:
            ids = [[token] for token in prompt_ids[1:]]
            logp = rows.gather(-1, torch.tensor(ids)).tolist()
        extra = {"prompt_ids": [*ids, [0] * max(k, 1)], "prompt_logprobs": [*logp, [0.0] * max(k, 1)]}
        return SimpleNamespace(extra_fields={**extra, "global_steps": self.global_steps})


class TheirLoop:
    def __init__(self, config, server, output):
        self.config, self.server_manager, self.output = config, server, output

    async def run(self, sampling_params, **kwargs):
        return self.output


class Loop(RecordsTopK, TheirLoop):
    pass


def config(loss_mode="trustrl-dppo-topk-tv", **region):
    policy_loss = {"loss_mode": loss_mode, "region": region or {"divergence": {"k": K}}}
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": policy_loss}}})


def output(server, temperature=1.0, **more):
    prompt, response = [3, 1, 4, 1], [5, 9, 2]
    drawn = (server.logp[3:6] / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
    steps = {"min_global_steps": 3, "max_global_steps": 3}
    return SimpleNamespace(
        prompt_ids=prompt, response_ids=response, response_logprobs=drawn.tolist(), extra_fields=steps | more
    )


def run(loop, temperature=1.0):
    return asyncio.run(loop.run({"temperature": temperature}))


def test_each_response_token_gets_the_distribution_it_was_drawn_from():
    server = TableServer()
    found = run(Loop(config(), server, output(server))).extra_fields
    wanted = server.logp[3:6].topk(K, -1)
    assert found["teacher_ids"].tolist() == wanted.indices.tolist()
    torch.testing.assert_close(found["teacher_logprobs"], wanted.values)
    assert [asked["prompt_logprobs"] for asked in server.asked] == [K]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_scores_are_brought_to_the_temperature_of_the_draw(temperature):
    server = TableServer()
    found = run(Loop(config(), server, output(server, temperature)), temperature).extra_fields
    wanted = (server.logp[3:6] / temperature).log_softmax(-1).topk(K, -1)
    assert found["teacher_ids"].tolist() == wanted.indices.tolist()
    torch.testing.assert_close(found["teacher_logprobs"], wanted.values)
    assert [asked["prompt_logprobs"] for asked in server.asked] == [K, 0]


def as_a_worker_gets(*outputs):
    """Sequences on their way through verl's queue: what `AgentLoopOutput.as_dict` and verl's own helper make of them."""
    samples = []
    for one in outputs:
        extra = dict(one.extra_fields)
        fields = {name: extra.pop(name) for name in (anchors.SAMPLED_IDS, anchors.SAMPLED_LOGP)}
        mask = torch.ones(len(one.response_ids), dtype=torch.long)
        samples.append({**fields, "response_mask": mask, "rollout_log_probs": -1.0 * mask, "extra_fields": extra})
    return list_of_dict_to_tensordict(samples)


def refused_by_the_worker(loop, temperature=1.0):
    """The error that a worker raises for this loop's sequence in a batch with another one."""
    good = run(Loop(config(), TableServer(), output(TableServer())))
    faulty = run(loop, temperature)
    with pytest.raises(EngineError) as refused:
        anchors.check(NEEDS, as_a_worker_gets(good, faulty))
    return str(refused.value)


def test_a_worker_takes_sequences_that_were_scored():
    server = TableServer()
    scored = [run(Loop(config(), server, output(server))) for _ in range(2)]
    anchors.check(NEEDS, as_a_worker_gets(*scored))


def test_a_temperature_without_recorded_log_probs_stops_the_worker():
    server = TableServer()
    without = output(server)
    without.response_logprobs = None
    assert "calculate_log_probs=True" in refused_by_the_worker(Loop(config(), server, without), 0.6)


@pytest.mark.parametrize("steps", [{"min_global_steps": 2}, {"min_global_steps": 2, "max_global_steps": 2}])
def test_scores_of_other_weights_stop_the_worker_and_lose_no_sequence(steps):
    """Raised in the loop, verl would log the error and train on the group's other sequences."""
    server = TableServer()
    said = refused_by_the_worker(Loop(config(), server, output(server, **steps)))
    assert re.search(r"3 tokens without scores.*weights of step 3 for a sequence of step 2.*anchor=proximal", said)


def test_a_server_that_fails_to_score_stops_the_worker():
    server = TableServer()
    sampled = output(server)

    async def fail(*args, **kwargs):
        raise RuntimeError("the prompt is longer than the model's maximum")

    server.generate = fail
    assert "RuntimeError: the prompt is longer" in refused_by_the_worker(Loop(config(), server, sampled))


def test_servers_that_do_not_say_which_weights_they_had_are_believed():
    server = TableServer(global_steps=None)
    assert "teacher_ids" in run(Loop(config(), server, output(server))).extra_fields


@pytest.mark.parametrize(
    ("of", "k"),
    [
        (config("vanilla"), 0),
        (config("trustrl-dppo-binary-tv", max_ratio=5.0), 0),
        (config("trustrl-dppo-topk-tv", anchor="proximal"), 0),
        (config("trustrl-troll", anchor="behavior"), 64),
        (config(), K),
    ],
)
def test_only_regions_on_the_samplers_top_k_are_scored(of, k):
    assert sampled_topk(of) == k
    server = TableServer()
    if k <= VOCABULARY:
        run(Loop(of, server, output(server)))
        assert bool(server.asked) == bool(k)


def test_loading_the_package_registers_every_loop_that_a_region_may_be_given():
    """verl's workers load the package by its name alone."""
    code = (
        "import trustrl.engines.verl, trustrl.engines.refusals.verl as rows; "
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known; "
        "assert set(rows.RECORDING.values()) <= known.keys(), known.keys()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_every_output_of_a_loop_is_scored():
    server = TableServer()
    several = run(Loop(config(), server, [output(server), output(server)]))
    assert all("teacher_logprobs" in one.extra_fields for one in several)
