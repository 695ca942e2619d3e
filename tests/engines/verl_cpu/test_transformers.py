"""The transformers sampler without Ray: against the model's own softmax, alone and in batches, before and after weights."""

import asyncio
import pickle
import time
from uuid import uuid4

import pytest

pytest.importorskip("verl")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.tiny_models import VOCABULARY, full_logps, perturb, save_model, some_sequences
from trustrl.engines.common.sampler_fields import TOPK, TOPK_IDS, TOPK_LOGP
from trustrl.errors import ConfigError, EngineError
from trustrl_verl_cpu.sampler_server import Limits, buckets
from trustrl_verl_cpu.transformers_server import TransformersServer

EXACT = 2e-5
LIMITS = Limits(prompt=32, response=8, total=40)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, tied=request.param)
    return folder


def ask(path, calls, *, before=None, **settings):
    """The answers to concurrent requests of one server, and the sizes of the batches they were answered in."""
    options = {"batch_size": 64, "dtype": "float32", "load_weights": True, "ignore_eos": True, "seed": 0} | settings

    async def run():
        server = TransformersServer(str(path), LIMITS, **options)
        await server.start()
        if before is not None:
            await before(server)
        sizes, answer = [], server._answers
        server._answers = lambda requests: sizes.append(len(requests)) or answer(requests)
        found = await asyncio.gather(*(server.generate(ids, dict(how), uuid4().hex) for ids, how in calls))
        return found, sizes

    return asyncio.run(run())


def sampling(temperature=1.0, **more):
    return {"temperature": temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **more}


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_most_probable_ids_come_with_the_tokens(path, temperature):
    prompts, widths = some_sequences(3, 30, 11, 1), (5, 0, 20, 1)
    calls = [
        (p, sampling(temperature, **({"extra_args": {TOPK: k}} if k else {})))
        for p, k in zip(prompts, widths, strict=True)
    ]
    answers, _ = ask(path, calls)
    model = AutoModelForCausalLM.from_pretrained(path)
    for prompt, answer, k in zip(prompts, answers, widths, strict=True):
        if not k:
            assert TOPK_IDS not in answer.extra_fields
            continue
        truth = (full_logps(model, prompt + answer.token_ids)[len(prompt) - 1 :] / temperature).log_softmax(-1)
        ids, logp = (torch.from_numpy(answer.extra_fields[name]) for name in (TOPK_IDS, TOPK_LOGP))
        assert ids.shape == (8, k)
        torch.testing.assert_close(logp, truth.topk(k).values, atol=EXACT / temperature, rtol=0)
        torch.testing.assert_close(logp, truth.gather(-1, ids.long()), atol=EXACT / temperature, rtol=0)


def scoring(k):
    return {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k, "detokenize": False}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_are_of_the_distribution_sampled_from(path, temperature):
    prompts = some_sequences(3, 30, 11, 1)
    answers, _ = ask(path, [(p, sampling(temperature)) for p in prompts])
    model = AutoModelForCausalLM.from_pretrained(path)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == len(answer.log_probs) == 8
        logits = full_logps(model, prompt + answer.token_ids)[len(prompt) - 1 :]
        truth = torch.log_softmax(logits / temperature, -1)[torch.arange(8), answer.token_ids]
        torch.testing.assert_close(torch.tensor(answer.log_probs), truth, atol=EXACT / temperature, rtol=0)


def test_tokens_are_drawn_as_often_as_they_are_probable(path):
    (prompt,) = some_sequences(5)
    count = 2000
    answers, _ = ask(path, [(prompt, sampling(0.8, max_tokens=1))] * count, batch_size=500)
    drawn = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(path)
    p = torch.softmax(full_logps(model, [*prompt, 0])[-1] / 0.8, -1)
    likely = p > 0.01
    assert likely.sum() >= 3
    error = (drawn - count * p)[likely] / (count * p * (1 - p))[likely].sqrt()
    assert error.abs().max() < 5


def test_greedy_is_the_same_alone_and_in_a_batch(path):
    prompts = some_sequences(2, 31, 17, 8)
    together, _ = ask(path, [(p, sampling(0)) for p in prompts])
    for prompt, one in zip(prompts, together, strict=True):
        (alone,), _ = ask(path, [(prompt, sampling(0))])
        assert alone.token_ids == one.token_ids
        torch.testing.assert_close(torch.tensor(alone.log_probs), torch.tensor(one.log_probs), atol=EXACT, rtol=0)


def test_a_response_ends_with_the_end_token_or_at_its_own_length(path):
    prompts = some_sequences(*[4] * 1000, seed=9)
    calls = [(p, sampling(50.0, max_tokens=3 + i % 4)) for i, p in enumerate(prompts)]
    answers, _ = ask(path, calls, ignore_eos=False, batch_size=1000)
    ended = [answer for answer in answers if 1 in answer.token_ids]
    assert ended  # 1 is the end of a text
    assert all(answer.token_ids.index(1) == len(answer.token_ids) - 1 for answer in ended)
    for i, answer in enumerate(answers):
        assert len(answer.log_probs) == len(answer.token_ids) <= 3 + i % 4
        assert answer in ended or len(answer.token_ids) == 3 + i % 4


def test_concurrent_requests_are_answered_together(path):
    _, sizes = ask(path, [(p, sampling()) for p in some_sequences(*[6] * 100)], batch_size=64)
    assert sum(sizes) == 100
    assert max(sizes) == 64
    assert len(sizes) <= 3


@pytest.mark.parametrize("k", [0, 1, 8])
def test_scores_follow_verls_contract(path, k):
    """Row j is the distribution that predicts token j+1; the last row is a dummy; K = 0 is the token itself."""
    sequences = some_sequences(2, 40, 17)
    answers, _ = ask(path, [(s, scoring(k)) for s in sequences])
    model = AutoModelForCausalLM.from_pretrained(path)
    for ids, answer in zip(sequences, answers, strict=True):
        found_ids = torch.tensor(answer.extra_fields["prompt_ids"])
        found_logps = torch.tensor(answer.extra_fields["prompt_logprobs"])
        assert found_ids.shape == found_logps.shape == (len(ids), max(k, 1))
        truth = full_logps(model, ids)
        expected = truth.topk(k).values if k else truth.gather(-1, torch.tensor(ids[1:])[:, None])
        torch.testing.assert_close(found_logps[:-1], expected, atol=EXACT, rtol=0)
        torch.testing.assert_close(truth.gather(-1, found_ids[:-1]), expected, atol=EXACT, rtol=0)
        assert not found_ids[-1].any()
        assert not found_logps[-1].any()


def test_scoring_in_parts_and_beside_sampling_changes_nothing(path, monkeypatch):
    sequences = some_sequences(12, 30, 7, 22, 3)
    whole, _ = ask(path, [(s, scoring(4)) for s in sequences])
    monkeypatch.setattr("trustrl_verl_cpu.transformers_server.LOGIT_BYTES", 2 * 4 * VOCABULARY * 30)
    mixed, sizes = ask(path, [call for s in sequences for call in ((s, sampling()), (s, scoring(4)))])
    assert sizes == [10]
    for one, other in zip(whole, mixed[1::2], strict=True):
        assert one.extra_fields["prompt_ids"] == other.extra_fields["prompt_ids"]
    assert all(len(answer.token_ids) == 8 for answer in mixed[0::2])


@pytest.mark.parametrize("loaded", [True, False], ids=["from the checkpoint", "from random weights"])
def test_new_weights_arrive(path, loaded):
    torch.manual_seed(1)
    trained = AutoModelForCausalLM.from_pretrained(path)
    perturb(trained)

    async def update(server):
        await server.begin_weights()
        pieces = list(buckets(trained.named_parameters(), limit=20_000))
        assert len(pieces) > 3
        for piece in pieces:
            await server.load_weights(pickle.loads(pickle.dumps(piece)))
        await server.end_weights(7)

    (ids,) = some_sequences(20)
    (answer,), _ = ask(path, [(ids, scoring(0))], before=update, load_weights=loaded)
    found = torch.tensor(answer.extra_fields["prompt_logprobs"])[:-1, 0]
    token = torch.tensor(ids[1:])[:, None]
    torch.testing.assert_close(found, full_logps(trained, ids).gather(-1, token)[:, 0], atol=EXACT, rtol=0)
    old = full_logps(AutoModelForCausalLM.from_pretrained(path), ids).gather(-1, token)[:, 0]
    assert (found - old).abs().max() > 0.1
    assert answer.extra_fields["global_steps"] == 7


@pytest.mark.parametrize("apart", [True, False], ids=["each expert by itself", "all in one tensor"])
def test_the_experts_of_a_mixture_arrive_under_both_names(apart, tmp_path):
    """transformers has one tensor for all experts of a layer. Checkpoints and Megatron have matrices of each."""
    save_model(tmp_path, tied=False, experts=4)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    perturb(trained)
    trained.save_pretrained(tmp_path / "trained")
    weights = load_file(tmp_path / "trained/model.safetensors") if apart else trained.state_dict()
    assert any(name.endswith("experts.3.gate_proj.weight") for name in weights) == apart

    def sends(weights):
        async def update(server):
            await server.begin_weights()
            for piece in buckets(weights.items(), limit=20_000):
                await server.load_weights(piece)
            await server.end_weights(7)

        return update

    (ids,) = some_sequences(20)
    (answer,), _ = ask(tmp_path, [(ids, scoring(0))], before=sends(weights), load_weights=False)
    found = torch.tensor(answer.extra_fields["prompt_logprobs"])[:-1, 0]
    token = torch.tensor(ids[1:])[:, None]
    torch.testing.assert_close(found, full_logps(trained, ids).gather(-1, token)[:, 0], atol=EXACT, rtol=0)
    last = [name for name in weights if ".experts." in name][-1]
    with pytest.raises(EngineError, match=r"1 are missing" if apart else r"[48] are missing"):
        ask(tmp_path, [], before=sends({name: weight for name, weight in weights.items() if name != last}))


def test_weights_that_do_not_fit_or_are_missing_are_refused(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    some = [("model.norm.weight", model.model.norm.weight)]

    def sends(weights):
        async def update(server):
            await server.begin_weights()
            for piece in buckets(weights):
                await server.load_weights(piece)
            await server.end_weights(1)

        return update

    with pytest.raises(EngineError, match="must send all of the sampler's weights"):
        ask(path, [], before=sends(some))
    with pytest.raises(EngineError, match="must be one of the sampler's weights"):
        ask(path, [], before=sends([("model.norm.weight", torch.zeros(3))]))
    with pytest.raises(EngineError, match=r"base_model\.q"):
        ask(path, [], before=sends([("base_model.q", torch.zeros(3))]))


@pytest.mark.parametrize(
    ("ids", "how", "sentence"),
    [
        pytest.param([1, 2], {"top_p": 0.9}, "top_p must be 1.0", id="top-p"),
        pytest.param([1, 2], {"top_k": 5}, "top_k must be -1", id="top-k"),
        pytest.param([1, 2], {"repetition_penalty": 1.2}, "repetition_penalty must be 1.0", id="a penalty"),
        pytest.param([1] * 40, {}, "fewer than 40 tokens", id="no room"),
        pytest.param([1] * 41, {"prompt_logprobs": 0, "max_tokens": 1}, "1 to 40 tokens", id="too long to score"),
        pytest.param([1, 2], {"prompt_logprobs": 0, "max_tokens": 2}, "max_tokens must be 1", id="score and sample"),
        pytest.param([1, 2], {"prompt_logprobs": 501, "max_tokens": 1}, "size 500, got 501", id="more than there are"),
    ],
)
def test_requests_that_do_not_fit_are_refused_in_a_sentence(path, ids, how, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ask(path, [(ids, how)])


def test_an_answer_arrives_as_verls_own(path):
    from verl.workers.rollout.replica import TokenOutput

    (answer,), _ = ask(path, [([1, 2], sampling())])
    arrived = pickle.loads(pickle.dumps(answer))
    assert isinstance(arrived, TokenOutput)
    assert (arrived.token_ids, arrived.log_probs) == (answer.token_ids, answer.log_probs)
    assert arrived.stop_reason == "completed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_weight_once(dtype):
    weights = [(f"w{i}", torch.randn(3, i).to(dtype)) for i in range(12)] + [("scalar", torch.tensor(2.0, dtype=dtype))]
    pieces = list(buckets(weights, limit=64))
    assert len(pieces) > 5
    arrived = [pair for piece in pieces for pair in piece.tensors()]
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, sent), (_, got) in zip(weights, arrived, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_an_aborted_request_returns_its_tokens_and_the_rest_follows_with_new_weights(path):
    """As verl's partial rollouts ask: abort, send weights, resume, and ask again with the tokens so far."""
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = some_sequences(5)[0]

    async def run():
        server = TransformersServer(
            str(path), LIMITS, batch_size=4, dtype="float32", load_weights=True, ignore_eos=True, seed=0
        )
        await server.start()
        await server.end_weights(3)
        draw, drawn = server._draw, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*args):
            loop.call_soon_threadsafe(drawn.set)
            time.sleep(0.05)
            return draw(*args)

        server._draw = slow
        first = asyncio.create_task(server.generate(prompt, sampling(), "a"))
        await drawn.wait()
        await server.abort_all_requests()
        held = asyncio.create_task(server.generate(prompt, sampling(), "b"))
        await asyncio.sleep(0.1)
        assert first.done()
        assert not held.done()
        perturb(model, 0.3)
        await server.begin_weights()
        for bucket in buckets(model.state_dict().items()):
            await server.load_weights(bucket)
        await server.end_weights(4)
        await server.resume_generation()
        one = first.result()
        rest = await server.generate(prompt + one.token_ids, sampling(max_tokens=8 - len(one.token_ids)), "a")
        return one, rest, await held

    one, rest, held = asyncio.run(run())
    assert 0 < len(one.token_ids) < 8
    assert (one.stop_reason, rest.stop_reason, held.stop_reason) == ("aborted", "completed", "completed")
    assert [x.extra_fields["global_steps"] for x in (one, rest, held)] == [3, 4, 4]
    assert len(one.token_ids) + len(rest.token_ids) == 8
    before = AutoModelForCausalLM.from_pretrained(path)
    for weights, start, part in ((before, prompt, one), (model, prompt + one.token_ids, rest), (model, prompt, held)):
        truth = full_logps(weights, start + part.token_ids)[len(start) - 1 :]
        wanted = truth.gather(-1, torch.tensor(part.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(part.log_probs), wanted, atol=EXACT, rtol=0)


def test_a_server_that_leaves_rejects_requests_until_it_resumes(path):
    async def run():
        server = TransformersServer(
            str(path), LIMITS, batch_size=4, dtype="float32", load_weights=True, ignore_eos=True, seed=0
        )
        await server.start()
        await server.abort_all_requests(reject_request=True)
        rejected = await server.generate([5, 6], sampling(), "a")
        await server.resume_generation()
        return rejected, await server.generate([5, 6], sampling(), "a")

    rejected, answered = asyncio.run(run())
    assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
    assert (len(answered.token_ids), answered.stop_reason) == (8, "completed")
