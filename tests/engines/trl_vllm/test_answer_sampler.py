"""Answers from vLLM and from transformers, for the selection of problems."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from support.tiny_models import save_model
from trustrl.errors import TrustRLWarning
from trustrl.runner.answer_samplers import AnswerSampling, sampler


def test_vllm_and_transformers_answer_alike_where_nothing_is_drawn(tmp_path):
    save_model(tmp_path / "model", tied=False)
    by_vllm = AnswerSampling(
        model=str(tmp_path / "model"), device="cpu", dtype="float32", temperature=0.0, answers=1, max_prompt_tokens=16,
        max_new_tokens=8, vllm={},
    )  # fmt: skip
    rows = [{"prompt": f"{i}+{i}="} for i in range(6)]
    answers = [sampler(settings)(rows, 0) for settings in (by_vllm, replace(by_vllm, vllm=None))]
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) > 3
    # vLLM itself would raise for the second, which leaves no room for an answer.
    for settings in (by_vllm, replace(by_vllm, vllm=None)):
        with pytest.warns(TrustRLWarning, match="1 problems get no answers"):
            assert sampler(settings)([rows[0], {"prompt": "1" * 40}], 0) == [answers[0][0], []]
    several = sampler(replace(by_vllm, vllm=None, answers=5, temperature=1.0))(rows, 0)
    assert [len(texts) for texts in several] == [5] * 6
