"""vLLM's adapter without an engine: its requests, its refusals, and how it reads spans of weight versions."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, WeightVersionSpan

from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.vllm.decode_record import REQUEST, DecodedLogprobs
from trustrl.engines.vllm.sampler_adapter import VLLMAdapter
from trustrl.errors import EngineError


def adapter(**settings):
    return VLLMAdapter(**{"vocabulary": 500, **settings})


def test_a_request_is_one_of_vllms_and_keeps_its_own_parameters():
    own, fields = adapter().request(Wanted(8), {"temperature": 0.7, "seed": 3, "extra_args": {"theirs": 1}})
    made = SamplingParams(**own)
    assert (made.temperature, made.seed, made.logprobs, fields) == (0.7, 3, 8, {})
    assert made.extra_args == {"theirs": 1, REQUEST: True}


def test_more_ids_than_the_vocabulary_has_are_not_asked_for():
    own, _ = adapter().request(Wanted(900, 4096), {"top_p": 0.9})
    assert own["logprobs"] == 500


REFUSED = [
    pytest.param({"logprobs_mode": "raw_logprobs"}, {"temperature": 0.7}, "logprobs_mode must be", id="temperature"),
    pytest.param({"logprobs_mode": "raw_logprobs"}, {"top_p": 0.7}, "logprobs_mode must be", id="truncation"),
    pytest.param({"logprobs_mode": "raw_logprobs"}, {"presence_penalty": 0.7}, "logprobs_mode must be", id="penalty"),
    pytest.param({"logprobs_mode": "raw_logits"}, {"temperature": 0.7}, "logprobs_mode must be", id="logits"),
    pytest.param({"max_logprobs": 20}, {}, r"max_logprobs must be 21 or more .* got 20", id="too many ids"),
    pytest.param({"speculates": True, "is_cpu": True}, {}, "speculative_config must be None", id="speculation"),
    pytest.param({"sampling_fields": frozenset({"logprobs"})}, {}, r"\['extra_args'\] are missing", id="other vLLM"),
]


@pytest.mark.parametrize(("settings", "parameters", "words"), REFUSED)
def test_a_request_that_vllm_cannot_record_is_refused(settings, parameters, words):
    with pytest.raises(EngineError, match=words):
        adapter(**settings).request(Wanted(21), parameters)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        pytest.param({"logprobs_mode": "raw_logprobs"}, {"temperature": 1.0, "top_p": 1.0}, id="nothing changes raw"),
        pytest.param({"max_logprobs": 21}, {}, id="as many as are allowed"),
        pytest.param({"speculates": True}, {}, id="speculation on a GPU"),
    ],
)
def test_what_vllm_can_record_is_not_refused(settings, parameters):
    assert adapter(**settings).refusal(Wanted(21), parameters) is None


def test_raw_logits_are_never_log_probs():
    assert "logprobs_mode must be" in (adapter(logprobs_mode="raw_logits").refusal(Wanted(), {}) or "")
    assert "logprobs_mode must be" in (adapter(logprobs_mode="processed_logits").refusal(Wanted(), {}) or "")


def completion(**values):
    logprobs = DecodedLogprobs(3, max_kept=2)
    for token in range(4):
        logprobs.add(np.array([[token, 7, 8, 9]]), np.array([[-1.0, -0.5, -1.0, -np.inf]], np.float32), np.ones(1))
    settings = {"index": 0, "text": "", "token_ids": [0, 1, 2, 3], "cumulative_logprob": None, "logprobs": logprobs}
    return CompletionOutput(**{**settings, **values})


def recorded(**values):
    return adapter().record(completion(**values), Wanted())


def test_an_answer_is_a_record():
    record = recorded(finish_reason="length")
    assert (record.tokens.tolist(), record.is_complete, record.version) == ([0, 1, 2, 3], True, None)
    assert record.topk_ids.tolist() == [[7, 8]] * 4
    assert (record.kept.ids.tolist(), record.kept.counts.tolist()) == ([7, 8] * 4, [2] * 4)
    assert not recorded(finish_reason="abort").is_complete
    assert not recorded().is_complete


def test_versions_that_are_numbers_are_kept_and_others_are_unknown():
    spans = [WeightVersionSpan("default", 0, 1), WeightVersionSpan("7", 1, 3), WeightVersionSpan("8", 3, 4)]
    assert recorded(weight_versions=spans).version.tolist() == [-1, 7, 7, 8]


def test_an_answer_that_was_not_recorded_is_an_error():
    with pytest.raises(EngineError, match=r"as DecodedLogprobs, got list.*decode_record.install"):
        adapter().record(completion(logprobs=[]), Wanted())


def test_an_answer_without_routed_experts_is_an_error():
    with pytest.raises(EngineError, match="experts of each of 4 sampled tokens"):
        adapter().record(SimpleNamespace(**vars(completion(finish_reason="length"))), Wanted(experts=True))
