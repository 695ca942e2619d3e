"""The sampler's record of an OpenRLHF response, and an agent's requests on vLLM's answers."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("vllm")

from vllm import SamplingParams

from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.openrlhf.rollout_actor import RecordingExecutor
from trustrl.engines.openrlhf.sampled_rows import SAMPLED, row_of
from trustrl.errors import ConfigError, EngineError


def record(tokens, kept=None, version=0):
    """The record of a request, K = 2: ids t and t + 1 at token t."""
    tokens = np.array(tokens, np.int32)
    column = None if kept is None else KeptColumn(np.concatenate(kept).astype(np.int32), np.array(list(map(len, kept))))
    return SampledRecord(
        tokens=tokens, logp=np.zeros(len(tokens), np.float32), topk_ids=np.stack([tokens, tokens + 1], 1),
        topk_logp=np.full((len(tokens), 2), -0.7, np.float32), kept=column,
        version=None if version is None else np.full(len(tokens), version, np.int32),
    )  # fmt: skip


RESPONSE = {"observation_tokens": [9, 5, 6, 8, 7], "action_ranges": [(1, 3), (4, 5)], "mm_train_inputs": None}


def test_the_requests_of_a_response_become_one_row():
    parts = [record([5, 6], [[5], [6, 2]], version=3), record([7], [[7, 1, 0]], version=4)]
    row = row_of(parts, RESPONSE, top_k=2, max_kept=3)
    assert row.topk_ids.tolist() == [[5, 6], [6, 7], [7, 8]]
    assert row.version.tolist() == [3, 3, 4]
    assert [ids.tolist() for ids in row.kept.rows()] == [[5], [6, 2], [7, 1, 0]]
    unknown = row_of([record([5, 6], version=None), record([7], version=4)], RESPONSE, top_k=2, max_kept=3)
    assert unknown.version.tolist() == [-1, -1, 4]
    assert unknown.kept is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([record([5, 6])], "must return the tokens of each of its 1 requests"),
        ([record([5, 6]), record([8])], "got 2 ranges or other tokens"),
        ([record([5, 6], [[5], [6]]), record([7])], "must truncate their sampling, or none, got 1 of 2"),
        ([record([5, 6], [[5], [6]]), record([7], [[0, 1, 7]])], "must keep at most 2 ids"),
    ],
)
def test_a_response_that_does_not_fit_its_requests_is_refused(parts, message):
    with pytest.raises(EngineError, match=message):
        row_of(parts, RESPONSE, top_k=2, max_kept=2)


class Adapter:
    """A stub of the adapter: its answers are records already."""

    def request(self, wanted, sampling_params):
        assert sampling_params["top_p"] in (0.9, 1.0)
        return SimpleNamespace(sampling_params={"extra_args": wanted._asdict()})

    def record(self, answer, wanted):
        return answer


def run_agent(top_p, *, always, images=None):
    """The response of an agent of two requests, and the parameters that the engine got."""
    answers, seen = iter([record([5, 6], [[5], [6, 2]]), record([7], [[7]])]), []

    class Engine:
        async def generate(self, prompt, params, multi_modal_data=None):
            seen.append(params.extra_args)
            return SimpleNamespace(outputs=[next(answers)])

    class Agent:
        async def execute(self, *, prompt, llm_engine):
            for _ in range(2):
                await llm_engine.generate(prompt, params)
            return RESPONSE | {"mm_train_inputs": images}

    params = SamplingParams(temperature=1.0, top_p=top_p, logprobs=1)
    executor = RecordingExecutor(Agent(), 2, 100, always=always)
    executor._adapter = Adapter()
    response = asyncio.run(executor.execute(prompt=[9], llm_engine=Engine()))
    assert params.extra_args is None  # the agent's own parameters
    return response, seen


def test_requests_that_truncate_are_recorded_with_every_region():
    for always in (True, False):
        response, seen = run_agent(0.9, always=always)
        assert seen == [{"top_k": 2, "max_kept": 100, "experts": False}] * 2
        assert response["mm_train_inputs"][SAMPLED].kept.counts.tolist() == [1, 2, 1]


def test_other_requests_are_recorded_if_the_region_reads_them():
    assert run_agent(1.0, always=True)[1] == [{"top_k": 2, "max_kept": 0, "experts": False}] * 2
    assert run_agent(1.0, always=False) == (RESPONSE, [None, None])


def test_images_are_refused_in_recorded_responses():
    with pytest.raises(ConfigError, match="Prompts must have no images if requests are recorded"):
        run_agent(0.9, always=False, images={"pixel_values": 0})
