"""The sampler's records on their way to verl's workers: single turns, tool loops, interrupted rollouts.

The loops and clients are verl's own. The servers are made by hand (a table of log-probs); real servers are in
tests/engines/verl_cpu.
"""

import asyncio
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import numpy as np
import torch
from omegaconf import OmegaConf
from transfer_queue.utils.serial_utils import encode
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

import trustrl
from trustrl import regions
from trustrl.engines.common.kept_columns import KeptColumn, column_of
from trustrl.engines.common.sampler_fields import (
    KEPT,
    KEPT_COUNTS,
    KEPT_IDS,
    REPLICA,
    TOPK,
    TOPK_IDS,
    TOPK_LOGP,
    UNRECORDED,
)  # fmt: skip
from trustrl.engines.verl import anchors, rollout_pieces
from trustrl.engines.verl.agent_loop import RecordsTopK, wanted
from trustrl.errors import EngineError, MissingDataError

VOCABULARY, K = 12, 4
NEEDS = trustrl.preset("dppo-topk-tv", divergence=regions.TopKTV(k=K)).needs()
PROMPT = [3, 1, 4, 1]


class TableServer:
    """Answers with the next tokens of a script, each drawn from one row of a table; every answer is a version newer."""

    def __init__(self, answers, *, aborted=0, faulty=False, routed=False, rows=32):
        make = torch.Generator().manual_seed(0)
        self.logp = torch.randn(rows, VOCABULARY, generator=make).log_softmax(-1)
        self.answers, self.aborted, self.faulty = list(answers), aborted, faulty
        self.asked, self.log, self.routed = [], [], routed
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id, prompt_ids, sampling_params, **more):
        self.asked.append(sampling_params)
        tokens = self.answers[len(self.asked) - 1]
        version = 6 + len(self.asked)
        rows = self.logp[len(prompt_ids) - 1 : len(prompt_ids) - 1 + len(tokens)]
        own = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        fields = {"global_steps": version}
        k = (sampling_params.get("extra_args") or {}).get(TOPK, 0)
        if k and not self.faulty:
            best = rows.topk(k, -1)
            fields |= {TOPK_IDS: best.indices.int().numpy(), TOPK_LOGP: best.values.numpy()}
            self.log += [(version, i, v) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        limit = (sampling_params.get("extra_args") or {}).get(KEPT, 0)
        if limit:  # as many as the id of the token drawn, at least one more than the limit if there are more
            column = column_of([range(min(token + 1, limit + 1)) for token in tokens])
            fields |= {KEPT_IDS: column.ids, KEPT_COUNTS: column.counts}
        stopped = "aborted" if len(self.asked) <= self.aborted else "completed"
        routing = self.routing(len(prompt_ids) + len(tokens) - 1) if self.routed else None
        return TokenOutput(
            token_ids=tokens, log_probs=own.tolist(), stop_reason=stopped, extra_fields=fields, routed_experts=routing
        )

    @staticmethod
    def routing(rows):
        """The experts of the tokens that were fed to a model of three layers with two experts each."""
        return np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2)


class Balancer:
    """A load balancer that answers one request after the other with the next of its servers."""

    def __init__(self, servers):
        self.turns = itertools.cycle(servers.items())
        for name in ("require_acquire_fields", "require_release_fields", "acquire_server", "release_server"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _require_acquire_fields(self):
        return []

    async def _require_release_fields(self):
        return []

    async def _acquire_server(self, request_id):
        return next(self.turns)

    def _release_server(self, server_id):
        pass


def client(server, cls=LLMServerClient, **servers):
    """verl's own client, connected to one server, or to several by name."""
    settings = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 16}}})
    return cls(settings, Balancer(servers or {"10.0.0.7:8000": server}))


def per_token(fields, length):
    """The version and the turn of each response token."""
    return tuple(anchors.per_token(fields[anchors.REQUESTS], length).tolist())


class TheirLoop:
    """Turns of a loop, with the tools' answers between them, as verl's loops make their output."""

    def __init__(self, config, server_manager, tools=(), *, response_length=16, edit=None):
        self.config, self.server_manager = config, server_manager
        self.tools, self.response_length, self.edit = tools, response_length, edit

    async def run(self, sampling_params, **kwargs):
        sequence, mask, fields = list(PROMPT), [], {}
        for tool in (None, *self.tools):
            if tool is not None:
                sequence += tool
                mask += [0] * len(tool)
            answer = await self.server_manager.generate(
                request_id="r", prompt_ids=list(sequence), sampling_params=sampling_params
            )
            fields = fields or answer.extra_fields  # verl keeps the first turn's
            routing = answer.routed_experts  # and the last turn's, which covers all tokens before it
            sequence += answer.token_ids
            mask += [1] * len(answer.token_ids)
        ids = sequence[len(PROMPT) :][: self.response_length]
        if self.edit is not None:
            ids = self.edit(ids)
        return AgentLoopOutput(
            prompt_ids=list(PROMPT), response_ids=ids, response_mask=mask[: self.response_length], extra_fields=fields,
            routed_experts=routing, metrics=AgentLoopMetrics(),
        )  # fmt: skip


class Loop(RecordsTopK, TheirLoop):
    pass


def config(loss_mode="trustrl-dppo-topk-tv", max_kept=None, **region):
    policy_loss = {"loss_mode": loss_mode, "region": region or {"divergence": {"k": K}}, "max_kept": max_kept}
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": policy_loss}}})


def run(loop, **sampling_params):
    return asyncio.run(loop.run({"temperature": 1.0, **sampling_params}))


def test_each_response_token_gets_the_row_it_was_drawn_from_and_no_second_request_is_made():
    server = TableServer([[5, 9, 2]])
    found = run(Loop(config(), client(server))).extra_fields
    wanted = server.logp[3:6].topk(K, -1)
    assert found["teacher_ids"].tolist() == wanted.indices.tolist()
    assert found["teacher_logprobs"].tolist() == wanted.values.tolist()
    assert per_token(found, 3) == ([7, 7, 7], [0, 0, 0])
    assert len(server.asked) == 1
    assert TOPK_IDS not in found  # verl would carry them to the trainer a second time


def test_a_prompt_of_a_benchmark_is_answered_with_its_own_settings():
    server, shared = TableServer([[5], [9]]), {"temperature": 1.0, "top_p": 1.0}
    loop = Loop(config(), client(server))
    for extra in ({"sampling": {"temperature": 0.0, "top_p": 0.5}}, {}):
        asyncio.run(loop.run(shared, extra_info=extra))
    assert [(asked["temperature"], asked["top_p"]) for asked in server.asked] == [(0.0, 0.5), (1.0, 1.0)]
    assert shared == {"temperature": 1.0, "top_p": 1.0}  # verl gives every prompt of a batch the same


def test_a_tool_loop_of_three_turns_keeps_the_rows_of_each():
    server = TableServer([[5, 9], [2], [8, 7, 6]])
    out = run(Loop(config(), client(server), tools=([10, 11], [0])))
    found = out.extra_fields
    assert out.response_mask == [1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert per_token(found, 9) == ([7, 7, -1, -1, 8, -1, 9, 9, 9], [0, 0, -1, -1, 1, -1, 2, 2, 2])
    at = [t for t, on in enumerate(out.response_mask) if on]
    ids, logp = found["teacher_ids"][at].tolist(), found["teacher_logprobs"][at].tolist()
    assert [(i, v) for _, i, v in server.log] == list(zip(ids, logp, strict=True))  # what the server's own log says
    off = [t for t, on in enumerate(out.response_mask) if not on]
    assert (found["teacher_ids"][off] == -1).all()
    assert (found["teacher_logprobs"][off] == -torch.inf).all()


def test_an_interrupted_rollout_has_the_version_of_each_part():
    """verl's fully asynchronous client resumes after a weight update, and drops `extra_fields` of all attempts."""
    server = TableServer([[5, 9, 2], [8], [7, 6]], aborted=2)
    asleep = asyncio.sleep
    try:
        asyncio.sleep = lambda seconds: asleep(0)  # verl waits a second before it resumes
        out = run(Loop(config(), client(server, FullyAsyncLLMServerClient)))
    finally:
        asyncio.sleep = asleep
    assert out.response_ids == [5, 9, 2, 8, 7, 6]
    assert per_token(out.extra_fields, 6) == ([7, 7, 7, 8, 9, 9], [0, 0, 0, 1, 2, 2])
    ids, logp = (out.extra_fields[name].tolist() for name in ("teacher_ids", "teacher_logprobs"))
    assert [(version, i, v) for version, i, v in server.log] == [
        (version, i, v) for version, i, v in zip([7, 7, 7, 8, 9, 9], ids, logp, strict=True)
    ]


@pytest.mark.parametrize("of", [config(), config("trustrl-dppo-binary-tv", max_ratio=5.0)], ids=["Top-K", "sampled"])
@pytest.mark.parametrize("tools", [(), ([10, 11], [0])], ids=["one turn", "three turns"])
def test_a_samplers_routing_reaches_verls_workers_as_without_our_loop(tools, of):
    """For verl's router replay (R3): all rows, in the field and the form that verl's own loop gives them."""
    answers = [[5, 9], [2], [8, 7, 6]][: 1 + len(tools)]
    ours = run(Loop(of, client(TableServer(answers, routed=True)), tools=tools))
    theirs = run(TheirLoop(of, client(TableServer(answers, routed=True)), tools=tools))
    length = len(ours.response_ids)
    np.testing.assert_array_equal(ours.routed_experts, TableServer.routing(len(PROMPT) + length - 1))
    sent, plain = ours.as_dict()["routed_experts"], theirs.as_dict()["routed_experts"]
    assert sent.shape == (len(PROMPT) + length, 3, 2)
    assert sent.dtype == plain.dtype
    assert torch.equal(sent, plain)


def test_a_resumed_rollouts_routing_is_joined_as_verl_joins_it():
    answers, asleep = [[5, 9, 2], [8], [7, 6]], asyncio.sleep
    outputs = []
    try:
        asyncio.sleep = lambda seconds: asleep(0)  # verl waits a second before it resumes
        for loop in (Loop, TheirLoop):
            server = TableServer(answers, aborted=2, routed=True)
            outputs.append(run(loop(config(), client(server, FullyAsyncLLMServerClient))))
    finally:
        asyncio.sleep = asleep
    ours, theirs = outputs
    assert ours.routed_experts.shape == (len(PROMPT) + 6 - 1, 3, 2)
    np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)


def test_a_response_that_verl_cuts_keeps_the_rows_that_are_left():
    server = TableServer([[5, 9], [2, 8, 7]])
    out = run(Loop(config(), client(server), tools=([10],), response_length=4))
    assert per_token(out.extra_fields, 4)[1] == [0, 0, -1, 1]
    assert out.extra_fields["teacher_ids"].shape == (4, K)


def test_several_outputs_of_one_loop_get_their_own_pieces():
    class Several(TheirLoop):
        async def run(self, sampling_params, **kwargs):
            return [await super().run(sampling_params), await super().run(sampling_params)]

    class Records(RecordsTopK, Several):
        pass

    server = TableServer([[5, 9, 2], [8, 7]])
    first, second = run(Records(config(), client(server)))
    assert per_token(first.extra_fields, 3)[0] == [7, 7, 7]
    assert per_token(second.extra_fields, 2)[0] == [8, 8]


def as_a_worker_gets(*outputs):
    """Sequences on their way through verl's queue: what `AgentLoopOutput.as_dict` and verl's own helper make of them."""
    samples = []
    for one in outputs:
        extra = dict(one.extra_fields)
        fields = {name: extra.pop(name) for name in (anchors.SAMPLED_IDS, anchors.SAMPLED_LOGP)}
        mask = torch.tensor(one.response_mask)
        more = {"responses": torch.tensor(one.response_ids), "rollout_log_probs": -1.0 * mask, "extra_fields": extra}
        samples.append({**fields, "response_mask": mask, **more})
    return list_of_dict_to_tensordict(samples)


def good():
    return run(Loop(config(), client(TableServer([[5, 9, 2]]))))


def refused_by_the_worker(faulty):
    """The error that a worker raises for this sequence in a batch with another one."""
    with pytest.raises(EngineError) as refused:
        anchors.check(NEEDS, as_a_worker_gets(good(), faulty))
    return str(refused.value)


def test_a_worker_takes_sequences_that_were_recorded_and_a_tools_tokens_need_no_record():
    tool = run(Loop(config(), client(TableServer([[5, 9], [2]])), tools=([10, 11],)))
    anchors.check(NEEDS, as_a_worker_gets(good(), tool))


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        pytest.param({}, [8, 9], id="nobody counted: one step for each version"),
        pytest.param({0: 0, 7: 7, 8: 8}, [8, 9], id="one step between syncs"),
        pytest.param({0: 0, 7: 28, 8: 32}, [29, 33], id="four steps between syncs"),
        pytest.param({8: 20}, [20, 21], id="a version from before a resume"),
    ],
)
def test_a_worker_numbers_versions_by_its_own_steps(sent, wanted):
    server = TableServer([[5, 9], [2, 4]])
    both = run(Loop(config(), client(server), tools=([10, 11],)))
    data = as_a_worker_gets(good(), both)
    found = anchors.versions(data, sent)[anchors.VERSION]
    assert found[1][both.response_mask.index(1)].item() == wanted[0]
    assert found[1][-1].item() == wanted[1]


def test_a_token_in_the_loss_without_a_version_leaves_the_batch_without_versions():
    lacking = good()
    del lacking.extra_fields[anchors.REQUESTS]
    assert anchors.versions(as_a_worker_gets(good(), lacking), {}) == {}
    lacking.response_mask = [0] * len(lacking.response_mask)  # verl's padding
    assert anchors.versions(as_a_worker_gets(good(), lacking), {})


def test_a_loop_that_tokenizes_again_stops_the_worker_and_loses_no_sequence():
    """Raised in the loop, verl would log the error and train on the group's other sequences."""
    server = TableServer([[5, 9, 2]])
    faulty = run(Loop(config(), client(server), edit=lambda ids: [*ids[:-1], 0]))
    said = refused_by_the_worker(faulty)
    assert re.search(r"did not record every sequence.*got 3 of 3 that are in no request's answer.*tokenize", said)


def test_a_server_without_top_k_stops_the_worker():
    faulty = run(Loop(config(), client(TableServer([[5, 9, 2]], faulty=True))))
    said = refused_by_the_worker(faulty)
    assert re.search(r"return its 4 most probable ids at each of 3 tokens, got None.*trustrl\.engines\.verl", said)


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
def test_only_regions_on_the_samplers_top_k_ask_for_it_and_all_get_versions(of, k):
    assert wanted(of) == (k, 0)
    server = TableServer([[5, 9, 2]])
    if k <= VOCABULARY:
        found = run(Loop(of, client(server))).extra_fields
        assert ("extra_args" in server.asked[0]) == bool(k)
        assert per_token(found, 3)[0] == [7, 7, 7]
        assert ("teacher_ids" in found) == bool(k)


BINARY = {"loss_mode": "trustrl-dppo-binary-tv", "divergence": {"max_increase": 0.2}}


def test_kept_ids_of_three_turns_are_those_of_the_sampler():
    server = TableServer([[5, 9], [2], [8, 7, 6]])
    out = run(Loop(config(**BINARY, max_kept=10), client(server), tools=([10, 11], [0])), top_p=0.9)
    column = KeptColumn(out.extra_fields[KEPT_IDS], out.extra_fields[KEPT_COUNTS])
    assert column.counts.tolist() == [6, 10, 0, 0, 3, 0, 9, 8, 7]
    assert [row.tolist() for row in column.rows()[:2]] == [list(range(6)), list(range(10))]
    assert [asked["extra_args"] for asked in server.asked] == [{KEPT: 10}] * 3
    batch = list_of_dict_to_tensordict(
        [{"response_mask": torch.tensor(out.response_mask), "extra_fields": out.extra_fields}] * 2
    )
    fields = anchors.kept(batch)
    ids = anchors.kept_ids({**fields, "response_mask": batch["response_mask"]})
    assert (ids >= 0).sum(-1).tolist() == [6, 10, 3, 9, 8, 7] * 2  # tokens in the loss only: no tool's token
    assert ids[8].tolist() == [0, 1, 2, *[-1] * 7]


def test_requests_that_draw_from_the_whole_vocabulary_do_not_ask_for_kept_ids():
    """As verl's validation may."""
    server = TableServer([[5, 9]])
    out = run(Loop(config(**BINARY, max_kept=10), client(server)), top_p=1.0, top_k=-1)
    assert "extra_args" not in server.asked[0]
    assert out.extra_fields[KEPT_COUNTS].tolist() == [0, 0]
    batch = list_of_dict_to_tensordict([{"response_mask": torch.tensor([1, 1]), "extra_fields": out.extra_fields}])
    with pytest.raises(MissingDataError, match=r"got none at 2 tokens of sequence 0.*rollout.top_p=1"):
        anchors.kept(batch)


def test_more_kept_ids_than_the_limit_reach_the_worker_as_an_error():
    """Raised in the loop, verl would log it and train on the other sequences."""
    out = run(Loop(config(**BINARY, max_kept=4), client(TableServer([[2, 9, 8]]))), top_k=5)
    batch = list_of_dict_to_tensordict(
        [
            {
                "response_mask": torch.tensor([1, 1, 1]),
                "rollout_log_probs": torch.zeros(3),
                "extra_fields": out.extra_fields,
            }
        ]
    )
    with pytest.raises(EngineError, match=r"at most 4 ids at each token, got more at 2 of 3 tokens"):
        anchors.check(trustrl.preset("dppo-binary-tv").needs(), batch)


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        ({"min_p": 0.1}, r"max_kept must be set if an agent loop truncates.*got null with min_p=0.1"),
        ({"top_k": 20, "min_p": 0.0}, r"max_kept must be set.*got null with top_k=20"),
        ({"temperature": 0.7}, r"sampling parameters that verl passes to `run`, got temperature=0.7"),
        ({"presence_penalty": 0.5}, r"sampling parameters that verl passes to `run`, got presence_penalty=0.5"),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "max_tokens": 8}, None),
    ],
    ids=["min_p", "top_k", "temperature", "penalty", "nothing"],
)
def test_a_loop_that_changes_the_distribution_of_its_own_requests_stops_the_worker(theirs, refused):
    """The checks at start see verl's settings alone."""

    class Changing(TheirLoop):
        async def run(self, sampling_params, **kwargs):
            return await super().run({**sampling_params, **theirs})

    class Records(RecordsTopK, Changing):
        pass

    out = run(Records(config(**BINARY), client(TableServer([[5, 9, 2]]))), top_p=1.0)
    sample = {"response_mask": torch.ones(3), "rollout_log_probs": torch.zeros(3), "extra_fields": out.extra_fields}
    batch = list_of_dict_to_tensordict([sample])
    if refused is None:
        anchors.check(trustrl.preset("dppo-binary-tv").needs(), batch)
        return
    with pytest.raises(EngineError, match=refused):
        anchors.check(trustrl.preset("dppo-binary-tv").needs(), batch)


def test_min_p_of_a_loops_own_requests_is_recorded_with_max_kept():
    class Changing(TheirLoop):
        async def run(self, sampling_params, **kwargs):
            return await super().run({**sampling_params, "min_p": 0.1})

    class Records(RecordsTopK, Changing):
        pass

    out = run(Records(config(**BINARY, max_kept=10), client(TableServer([[5, 9]]))))
    assert out.extra_fields[KEPT_COUNTS].tolist() == [6, 10]
    assert anchors.FAULT not in out.extra_fields


def test_the_reason_why_a_server_recorded_nothing_reaches_the_worker():
    """Raised in the loop, it would only remove the sequence, and verl would ask for another one."""

    class Refusing(TableServer):
        async def _generate(self, *args, **more):
            output = await super()._generate(*args, **more)
            output.extra_fields[UNRECORDED] = "top_k must be smaller."
            return output

    out = run(Loop(config(**BINARY, max_kept=10), client(Refusing([[5, 9], [2]])), tools=([10],)), top_p=0.9)
    assert out.extra_fields[anchors.FAULT] == "EngineError: top_k must be smaller."
    assert UNRECORDED not in out.extra_fields


def test_validation_may_truncate_with_verls_own_settings():
    """They are those that verl passes to the loop, and validation trains on nothing."""
    out = run(Loop(config(**BINARY), client(TableServer([[5, 9]]))), top_p=0.7, temperature=0.6)
    assert anchors.FAULT not in out.extra_fields


def test_a_sequence_carries_the_name_of_the_server_that_sampled_it():
    out = run(Loop(config(), client(TableServer([[5, 9], [2]])), tools=([10],)))
    assert out.extra_fields[REPLICA] == "10.0.0.7:8000"
    both = {name: TableServer([[5, 9], [2]]) for name in ("one", "two")}
    out = run(Loop(config(**BINARY), client(None, **both), tools=([10],)))
    assert out.extra_fields[REPLICA] is None  # two servers drew it
    theirs = run(TheirLoop(config(), client(TableServer([[5, 9]]))))
    assert theirs.extra_fields[REPLICA] == "10.0.0.7:8000"  # a record of verl's own loss names it too


@pytest.mark.parametrize("length", [1, 512, 4096])
def test_a_region_on_the_sampled_token_adds_a_few_bytes_per_sequence_and_none_per_token(length):
    """As verl's queue encodes them. `docs/reference/verl.md` has the figures."""
    answers = [[token % VOCABULARY for token in range(length)]]
    loop = Loop(config(**BINARY), client(TableServer(answers, rows=length + 8)), response_length=length)
    fields = run(loop).extra_fields
    verls = {name: value for name, value in fields.items() if not name.startswith("trustrl_")}
    unnamed = {name: value for name, value in fields.items() if name != REPLICA}
    whole, plain, nameless = (sum(map(len, encode(part))) for part in (fields, verls, unnamed))
    assert (whole - plain, whole - nameless) == (92, 30)


def test_requests_outside_a_loop_are_left_alone():
    server = TableServer([[5, 9, 2]])
    answer = asyncio.run(client(server).generate("r", prompt_ids=PROMPT, sampling_params={"extra_args": {TOPK: 2}}))
    np.testing.assert_array_equal(answer.extra_fields[TOPK_IDS], server.logp[3:6].topk(2, -1).indices)
    before = LLMServerClient.generate
    rollout_pieces.install()
    assert LLMServerClient.generate is before


def test_loading_the_package_registers_every_loop_that_a_region_may_be_given():
    """verl's workers load the package by its name alone."""
    code = (
        "import trustrl.engines.verl, trustrl.engines.refusals.verl as rows; "
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known; "
        "assert set(rows.RECORDING.values()) <= known.keys(), known.keys()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
