"""SGLang's own answers as records, on a real engine: μ against a float32 forward, kept ids, and versions at each token."""

import asyncio
import base64
import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang")

import torch
from transformers import AutoModelForCausalLM

from support.tiny_models import VOCABULARY
from trustrl.engines.common.sampled_record import UNKNOWN
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.sglang import SGLangAdapter
from trustrl.errors import ConfigError, EngineError

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43, 44, 45], [77, 12, 90]]
K, LENGTH = 8, 24
EXACT = 5e-5
"""Largest difference in nats between two ways to compute a log-prob in float32."""

PARAMETERS = {"max_tokens": LENGTH, "ignore_eos": True}
CASES = {
    "temperature-1": {"temperature": 1.0},
    "temperature-0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0, "top_p": 0.9},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k-and-top-p": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
}


@pytest.fixture(scope="session")
def adapter(sampler):
    return SGLangAdapter.of(sampler.manager.server_args, VOCABULARY)


@pytest.fixture(scope="session")
def forwards(models):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]


@torch.no_grad()
def logps(model, prompt, record, parameters):
    """(T, V): log-probs of the distribution that the definitions of temperature and truncation give."""
    logits = model(torch.tensor([[*prompt, *record.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1].double()
    temperature = parameters.get("temperature", 1.0) or 1.0
    scaled = torch.log_softmax(logits / temperature, -1)
    if parameters.get("temperature") == 0:
        return scaled
    ordered, order = scaled.sort(-1, descending=True)
    mass = ordered.exp().cumsum(-1) - ordered.exp()
    kept = mass <= parameters.get("top_p", 1.0)
    kept &= ordered >= ordered[:, :1] + math.log(parameters.get("min_p", 0.0) or 1e-300)
    if "top_k" in parameters:
        kept[:, parameters["top_k"] :] = False
    ordered = torch.log_softmax(ordered.masked_fill(~kept, -torch.inf), -1)
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def recorded(sampler, adapter, parameters, wanted):
    request = adapter.request(wanted, {**PARAMETERS, **parameters})
    return [adapter.record(answer, wanted) for answer in sampler.answers(PROMPTS, *request)]


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
def test_records_are_those_of_the_distribution_that_was_drawn_from(sampler, adapter, forwards, parameters):
    truncated = parameters.get("temperature") != 0 and len(parameters) > 1
    records = recorded(sampler, adapter, parameters, Wanted(K, VOCABULARY))
    for prompt, record in zip(PROMPTS, records, strict=True):
        drawn = logps(forwards[0], prompt, record, parameters)
        own = drawn.gather(1, torch.from_numpy(record.tokens).long()[:, None])[:, 0]
        assert np.abs(record.logp - own.numpy()).max() < EXACT
        best = drawn.topk(K, -1)
        there = torch.isfinite(best.values).numpy()
        assert np.array_equal(record.topk_ids, np.where(there, best.indices.numpy(), UNKNOWN))
        assert np.abs(record.topk_logp[there] - best.values.numpy()[there]).max() < EXACT
        assert np.all(np.isneginf(record.topk_logp[~there]))
        assert (record.kept is not None) is truncated
        if truncated:
            expected = [set(row.nonzero()[:, 0].tolist()) for row in torch.isfinite(drawn)]
            assert [set(row.tolist()) for row in record.kept.rows()] == expected
        assert record.is_complete
        assert np.array_equal(record.version, np.zeros(LENGTH))


def test_a_truncated_request_has_mu_even_if_nothing_else_is_wanted(sampler, adapter, forwards):
    parameters = CASES["top-p"]
    for prompt, record in zip(PROMPTS, recorded(sampler, adapter, parameters, Wanted()), strict=True):
        own = logps(forwards[0], prompt, record, parameters).gather(1, torch.from_numpy(record.tokens).long()[:, None])
        assert np.abs(record.logp - own[:, 0].numpy()).max() < EXACT
        assert record.topk_ids.shape == (LENGTH, 0)
        assert record.kept is None


def test_without_the_mask_log_probs_are_those_of_the_whole_vocabulary(sampler, adapter, forwards):
    """The fault that the mask repairs: without it this file's comparison fails by more than a tenth of a nat."""
    params, _ = adapter.request(Wanted(), {**PARAMETERS, **CASES["top-p"]})
    gaps = []
    for prompt, answer in zip(PROMPTS, sampler.answers(PROMPTS, params, {"return_logprob": True}), strict=True):
        record = adapter.record(answer, Wanted())
        own = logps(forwards[0], prompt, record, CASES["top-p"]).gather(1, torch.tensor(record.tokens)[:, None].long())
        gaps.append(np.abs(record.logp - own[:, 0].numpy()).max())
    assert max(gaps) > 0.1


def test_lists_of_an_older_sglang_give_the_same_record(sampler, adapter):
    """SGLang before 0.5.22 has no flat arrays: this release returns its nested lists if they are not asked for."""
    older = SGLangAdapter(
        vocabulary=VOCABULARY, mask_limit=adapter.mask_limit,
        request_fields=adapter.request_fields - {"return_flat_raw_output_top_logprobs"},
    )  # fmt: skip
    fields = older.request(Wanted(K), PARAMETERS).fields
    assert "return_flat_raw_output_top_logprobs" not in fields
    greedy = {"temperature": 0.0}
    flat, nested = (recorded(sampler, one, greedy, Wanted(K)) for one in (adapter, older))
    for new, old in zip(flat, nested, strict=True):
        assert np.array_equal(new.tokens, old.tokens)
        assert np.array_equal(new.topk_ids, old.topk_ids)
        np.testing.assert_allclose(new.topk_logp, old.topk_logp, atol=EXACT, rtol=0)


def test_several_completions_of_a_prompt_each_have_a_record(sampler, adapter):
    params, fields = adapter.request(Wanted(K), {**PARAMETERS, "n": 3})
    answers = sampler.run(sampler.answer(PROMPTS[0], params, fields))
    records = [adapter.record(answer, Wanted(K)) for answer in answers]
    assert len({tuple(record.tokens.tolist()) for record in records}) == 3


@pytest.fixture(scope="session")
def interrupted(sampler, adapter, models):
    """Answers that an update of the weights interrupted, by the mode of the pause. Weights alternate."""

    async def run(mode, path, version):
        params, fields = adapter.request(Wanted(K), {"max_tokens": 400, "ignore_eos": True})
        jobs = [asyncio.create_task(sampler.answer(prompt, params, fields)) for prompt in PROMPTS]
        states = sampler.manager.rid_to_state
        while len(states) < len(PROMPTS) or any(len(state.output_ids) < 4 for state in states.values()):
            await asyncio.sleep(0.01)
        await sampler.updated(path, version, mode=mode)
        return await asyncio.gather(*jobs)

    modes = ("abort", "retract", "in_place")
    answers = {
        mode: sampler.run(run(mode, models[number % 2], str(number))) for number, mode in enumerate(modes, start=1)
    }
    sampler.run(sampler.updated(models[0], "0", mode="abort"))
    return answers


def exact(adapter, pause):
    return SGLangAdapter(
        vocabulary=VOCABULARY, mask_limit=adapter.mask_limit, request_fields=adapter.request_fields, pause=pause
    )


def off(forward, prompt, record):
    """How far log μ is from a model's, at each token."""
    return np.abs(
        logps(forward, prompt, record, {}).gather(1, torch.from_numpy(record.tokens).long()[:, None])[:, 0].numpy()
        - record.logp
    )


def test_an_aborted_answer_is_incomplete_and_of_the_old_weights(adapter, interrupted, forwards):
    for prompt, answer in zip(PROMPTS, interrupted["abort"], strict=True):
        record = exact(adapter, "abort").record(answer, Wanted(K))
        assert not record.is_complete
        assert 0 < len(record) < 400
        assert np.all(record.version == 0)
        assert off(forwards[0], prompt, record).max() < EXACT


def test_versions_of_a_retracted_answer_are_exact(adapter, interrupted, forwards):
    for prompt, answer in zip(PROMPTS, interrupted["retract"], strict=True):
        record = exact(adapter, "retract").record(answer, Wanted(K))
        assert record.is_complete
        assert set(record.version.tolist()) == {1, 2}
        for version, forward in ((1, forwards[1]), (2, forwards[0])):
            assert off(forward, prompt, record)[record.version == version].max() < EXACT


def test_the_boundary_of_an_update_in_place_has_an_unknown_version(adapter, interrupted, forwards):
    """SGLang gives it to the new weights, although the old ones drew it."""
    mislabeled = 0
    for prompt, answer in zip(PROMPTS, interrupted["in_place"], strict=True):
        record = adapter.record(answer, Wanted(K))
        old = off(forwards[0], prompt, record)
        assert old[record.version == 2].max() < EXACT
        (boundary,) = np.flatnonzero(record.version == UNKNOWN)
        assert set(record.version[boundary + 1 :].tolist()) == {3}
        assert exact(adapter, "retract").record(answer, Wanted(K)).version[boundary] == 3
        mislabeled += int(old[boundary] < EXACT)
    assert mislabeled, "SGLang's boundary was right: this adapter is stricter than it must be"


def test_one_version_per_answer_is_that_of_all_tokens_only_if_updates_abort(adapter, interrupted):
    answer = interrupted["abort"][0]
    older = {**answer, "meta_info": {k: v for k, v in answer["meta_info"].items() if k != "weight_versions"}}
    assert set(exact(adapter, "abort").record(older, Wanted(K)).version.tolist()) == {0}
    assert exact(adapter, "retract").record(older, Wanted(K)).version is None
    assert adapter.record(older, Wanted(K)).version is None


def test_versions_that_are_no_numbers_are_unknown(adapter, interrupted):
    answer = interrupted["abort"][0]
    spans = [{**span, "version": "default"} for span in answer["meta_info"]["weight_versions"]]
    named = {**answer, "meta_info": {**answer["meta_info"], "weight_versions": spans}}
    assert set(adapter.record(named, Wanted(K)).version.tolist()) == {UNKNOWN}


def test_a_damaged_answer_raises(sampler, adapter):
    params, fields = adapter.request(Wanted(K), PARAMETERS)
    (answer,) = sampler.answers(PROMPTS[:1], params, fields)
    meta = answer["meta_info"]
    others = [token + 1 for token in answer["output_ids"]]
    with pytest.raises(EngineError, match="must return the log-prob of each of 24 sampled tokens"):
        adapter.record({**answer, "output_ids": others}, Wanted(K))
    with pytest.raises(EngineError, match="got 0 log-probs"):
        adapter.record({**answer, "meta_info": {**meta, "output_token_logprobs": []}}, Wanted(K))
    (plain,) = sampler.answers(PROMPTS[:1], params, {"return_logprob": True})
    with pytest.raises(EngineError, match="must return 8 ids at each of 24 tokens"):
        adapter.record(plain, Wanted(K))
    shape = [meta["output_top_logprobs_shape"][0] - 1, K]
    cut = {
        name: base64.b64encode(base64.b64decode(value)[: -4 * K]).decode()
        for name, value in meta.items()
        if name.endswith("_flat_b64")
    }
    with pytest.raises(EngineError, match="must return topk_ids for each of 24 tokens, got 23 rows"):
        adapter.record({**answer, "meta_info": {**meta, **cut, "output_top_logprobs_shape": shape}}, Wanted(K))
    refused = {"type": "abort", "message": "queue is full", "status_code": 503}
    with pytest.raises(EngineError, match="it refused: queue is full"):
        adapter.record({**answer, "meta_info": {**meta, "finish_reason": refused}}, Wanted(K))


def settings(**more):
    return SGLangAdapter(**{"vocabulary": 151_936, "mask_limit": 4096, "request_fields": frozenset()} | more)


NEWEST = frozenset({"return_sampling_mask", "sampling_logprobs_mode"})


@pytest.mark.parametrize(
    ("adapter", "wanted", "parameters", "reason"),
    [
        (settings(), Wanted(K), {"top_p": 0.9, "top_k": 50}, "must have the field return_sampling_mask"),
        (
            settings(request_fields=frozenset({"return_sampling_mask"})), Wanted(K), {"min_p": 0.1, "top_k": 50},
            "must have the field sampling_logprobs_mode",
        ),
        (settings(request_fields=NEWEST), Wanted(), {"top_p": 0.9}, "from 1 to 4,096 .* got None"),
        (settings(request_fields=NEWEST), Wanted(), {"top_k": 5000}, "from 1 to 4,096 .* got 5000"),
        (settings(request_fields=NEWEST), Wanted(K, experts=True), {}, "experts must be False"),
        (settings(fault="No."), Wanted(), {}, "No."),
    ],
    ids=["before-0.5.16", "before-0.5.21", "pure-top-p", "large-top-k", "experts", "server"],
)  # fmt: skip
def test_a_request_that_sglang_cannot_record_is_refused(adapter, wanted, parameters, reason):
    with pytest.raises(EngineError, match=reason):
        adapter.request(wanted, parameters)


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.0, "top_p": 0.5}, {"top_k": -1, "top_p": 1.0}])
def test_an_old_sglang_records_requests_that_do_not_truncate(parameters):
    assert settings().refusal(Wanted(K), parameters) is None


def test_a_top_k_of_the_whole_vocabulary_is_set_only_where_it_keeps_every_id(sampler, adapter):
    assert adapter.request(Wanted(), {"top_p": 0.9}).sampling_params["top_k"] == VOCABULARY
    params = adapter.request(Wanted(), {"max_tokens": 3, "min_tokens": 1, "seed": 4, "logprobs": 0}).sampling_params
    assert params == {"max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 4}


@pytest.mark.parametrize(
    ("server", "reason"),
    [({"rl_on_policy_target": "fsdp"}, "rl_on_policy_target must be None, got 'fsdp'"),
     ({"enable_watermark": True}, "enable_watermark must be False")],
)  # fmt: skip
def test_a_server_whose_log_probs_are_of_another_distribution_is_refused(server, reason):
    adapter = SGLangAdapter.of(SimpleNamespace(**server), 500)
    with pytest.raises(EngineError, match=reason):
        adapter.request(Wanted(), {})


def test_original_log_probs_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "True")
    assert "before the temperature" in SGLangAdapter.of(SimpleNamespace(), 500).refusal(Wanted(), {})
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    assert SGLangAdapter.of(SimpleNamespace(), 500).refusal(Wanted(), {}) is None


def test_an_unknown_pause_is_refused():
    with pytest.raises(ConfigError, match="pause must be one of 'abort', 'retract', 'in_place'"):
        settings(pause="keep")
