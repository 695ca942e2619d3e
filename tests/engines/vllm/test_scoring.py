"""Re-scored log-probs against transformers' full softmax, against decoding, and against what vLLM would refuse."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams

from support.tiny_models import LONGEST, VOCABULARY, full_logps, some_sequences
from trustrl import TopK
from trustrl.engines.vllm import install_sync, score, score_rollout
from trustrl.errors import ConfigError, RecordError

EXACT = 1e-4


@pytest.fixture
def generation(samplers, tied):
    generation = samplers(tied=tied)
    install_sync(generation)
    generation.sync_weights()
    return generation


@pytest.mark.parametrize("k", [0, 1, 8, 64])
def test_scores_are_the_full_softmax_read_at_the_token_and_at_the_top(generation, k):
    sequences, prompt_lengths = some_sequences(5, 40, 17), [1, 30, 16]
    scores = score(generation.llm, sequences, prompt_lengths, k)
    assert scores.logp.shape == (3, 10)
    assert scores.top_ids.shape == scores.top_logp.shape == (3, 10, k)
    assert scores.valid.sum(-1).tolist() == [4, 10, 1]
    outside = 0
    for row, (ids, start) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        truth = full_logps(generation.model, ids)[start - 1 :]
        token = torch.tensor(ids[start:])[:, None]
        length = len(truth)
        torch.testing.assert_close(scores.logp[row, :length], truth.gather(-1, token)[:, 0], atol=EXACT, rtol=0)
        best = truth.topk(k)
        torch.testing.assert_close(scores.top_logp[row, :length], best.values, atol=EXACT, rtol=0)
        at_ids = truth.gather(-1, scores.top_ids[row, :length])
        torch.testing.assert_close(scores.top_logp[row, :length], at_ids, atol=EXACT, rtol=0)
        outside += (scores.top_ids[row, :length] != token).all(-1).sum().item()
        assert (scores.logp[row, length:] == 0).all()
        assert (scores.top_ids[row, length:] == -1).all()
        assert (scores.top_logp[row, length:] == -torch.inf).all()
    assert outside >= 3  # random tokens: some must be outside the top, or the case was not tried


def test_scores_equal_what_was_recorded_while_decoding(generation):
    prompts = some_sequences(3, 9, 20)
    parameters = SamplingParams(max_tokens=16, logprobs=8, temperature=1.0, detokenize=False, ignore_eos=True, seed=3)
    outputs = generation.llm.generate(
        [{"prompt_token_ids": p} for p in prompts], sampling_params=parameters, use_tqdm=False
    )
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    sequences = [p + c for p, c in zip(prompts, completions, strict=True)]
    scores = score(generation.llm, sequences, [len(p) for p in prompts], k=8)
    for row, output in enumerate(outputs):
        for t, entries in enumerate(output.outputs[0].logprobs):
            assert scores.logp[row, t].item() == pytest.approx(entries[completions[row][t]].logprob, abs=1e-5)
            for i, logp in zip(scores.top_ids[row, t].tolist(), scores.top_logp[row, t].tolist(), strict=True):
                assert logp == pytest.approx(entries[i].logprob, abs=1e-5)


def test_vllms_prompt_logprobs_ignore_temperature_and_mode(generation):
    """TRL's engine returns processed log-probs, and these are raw all the same: they compare with μ at T = 1 only."""
    assert generation.llm.model_config.logprobs_mode == "processed_logprobs"
    (ids,) = some_sequences(20)
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, temperature=0.3, top_k=2)
    output = generation.llm.generate([{"prompt_token_ids": ids}], sampling_params=parameters, use_tqdm=False)[0]
    raw = score(generation.llm, [ids], [1], k=0).logp[0]
    assert output.prompt_logprobs.logprobs == pytest.approx(raw.tolist(), abs=1e-6)


def test_a_cached_prefix_hides_no_position(generation):
    (ids,) = some_sequences(LONGEST - 8, seed=4)
    parameters = SamplingParams(max_tokens=1, detokenize=False)
    for _ in range(2):
        output = generation.llm.generate([{"prompt_token_ids": ids}], sampling_params=parameters, use_tqdm=False)[0]
    assert output.num_cached_tokens > 0
    scores = score(generation.llm, [ids], [1], k=2)
    truth = full_logps(generation.model, ids).topk(2).values
    torch.testing.assert_close(scores.top_logp[0], truth, atol=EXACT, rtol=0)


def test_scoring_leaves_the_random_stream_alone(generation):
    """With checks switched on, a seeded run must draw the tokens it drew without."""
    before = torch.get_rng_state()
    score(generation.llm, some_sequences(20, 30), [1, 1], k=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_scores_are_what_records_take(generation):
    scores = score(generation.llm, some_sequences(6, 9), [2, 2], k=4)
    topk = TopK(scores.top_ids, scores.top_logp)
    assert torch.equal(topk.valid, scores.valid[..., None].expand_as(topk.valid))


def test_completions_may_be_empty_and_batches_too(generation):
    scores = score(generation.llm, some_sequences(6, 3), [6, 3], k=2)
    assert scores.logp.shape == (2, 0)
    scores = score(generation.llm, [], [], k=2)
    assert scores.top_ids.shape == (0, 0, 2)
    assert score(generation.llm, some_sequences(6, 4), [6, 2], k=2).valid.tolist() == [[False, False], [True, True]]


def test_rows_are_cut_to_their_own_longest(generation):
    sequences = some_sequences(4, 9, 3)
    scores = score(generation.llm, sequences, [1, 1, 1], k=2)
    alone = score(generation.llm, sequences[2:], [1], k=2)
    part = scores.rows(slice(2, 3))
    assert part.logp.shape == alone.logp.shape
    torch.testing.assert_close(part.top_logp, alone.top_logp, atol=EXACT, rtol=0)
    assert scores.rows(slice(0, 0)).logp.shape == (0, 0)


def test_the_cost_of_scoring(generation):
    """Printed, not judged: seconds depend on the machine. Flat log-probs keep it near one forward pass."""
    sequences = some_sequences(*[110] * 32)
    for k in (0, 20, 64):
        score(generation.llm, sequences, [10] * 32, k)
        start = time.perf_counter()
        scores = score(generation.llm, sequences, [10] * 32, k)
        microseconds = (time.perf_counter() - start) * 1e6 / scores.valid.sum().item()
        print(f"K = {k}: {microseconds:.0f} µs per completion token")
        assert scores.valid.all()


class TestRefusals:
    def test_more_ids_than_the_engine_was_built_for(self, generation):
        with pytest.raises(ConfigError, match=r"k must be at most 64, got 65.*extra_llm_options\(max_logprobs=65\)"):
            score(generation.llm, some_sequences(4), [1], k=65)

    def test_more_ids_than_there_are(self):
        with pytest.raises(ConfigError, match=r"k must be at most 500, got 501. The vocabulary does not have more ids"):
            score(stub(max_logprobs=-1), some_sequences(4), [1], k=VOCABULARY + 1)

    def test_a_sequence_that_fills_the_context(self, generation):
        full, shorter = some_sequences(LONGEST), some_sequences(LONGEST - 1)
        with pytest.raises(ConfigError, match=r"max_model_len must be at least 257 .* got 256.*vllm_max_model_length"):
            score(generation.llm, full, [1], k=0)
        assert score(generation.llm, shorter, [1], k=0).valid.all()

    def test_an_engine_that_returns_logits(self):
        with pytest.raises(ConfigError, match=r"logprobs_mode must be .* got 'processed_logits'"):
            score(stub(logprobs_mode="processed_logits"), some_sequences(4), [1], k=0)

    @pytest.mark.parametrize("length", [0, 5, -1])
    def test_prompts_that_are_not_there(self, generation, length):
        with pytest.raises(RecordError, match=rf"prompt_lengths\[0\] must be between 1 and .* 4 ids, got {length}"):
            score(generation.llm, some_sequences(4), [length], k=0)

    def test_lengths_for_other_sequences(self, generation):
        with pytest.raises(RecordError, match="one entry per sequence, got 2 for 1"):
            score(generation.llm, some_sequences(4), [1, 1], k=0)

    @pytest.mark.parametrize("k", [-1, 1.5, True])
    def test_a_k_that_counts_nothing(self, generation, k):
        with pytest.raises(ConfigError, match="k must be a whole number ≥ 0"):
            score(generation.llm, some_sequences(4), [1], k=k)

    def test_a_sampler_that_sleeps(self, generation):
        asleep = SimpleNamespace(mode="colocate", enable_sleep_mode=True)
        with pytest.raises(ConfigError, match="vllm_enable_sleep_mode must be False"):
            score_rollout(asleep, some_sequences(4), [1], k=1)


def stub(*, max_logprobs=20, logprobs_mode="raw_logprobs"):
    config = SimpleNamespace(
        max_logprobs=max_logprobs,
        logprobs_mode=logprobs_mode,
        max_model_len=LONGEST,
        get_vocab_size=lambda: VOCABULARY,
    )
    return SimpleNamespace(model_config=config)
