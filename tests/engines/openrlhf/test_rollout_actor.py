"""OpenRLHF's actor around a real vLLM, in this process: its records against a float32 forward pass."""

import asyncio

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from support.tiny_models import save_model
from trustrl.engines.openrlhf.sampled_rows import SAMPLED

K, TOP_P, TEMPERATURE = 5, 0.9, 0.8
LARGEST_ERROR = 1e-4
"""In nats."""


async def responses(folder, tokenizer):
    """Two responses by the first weights, and one after an update."""
    from trustrl.engines.openrlhf.rollout_actor import RecordingRolloutActor

    actor = RecordingRolloutActor.__new__(RecordingRolloutActor)  # Ray awaits `__init__`
    await actor.__init__(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, max_logprobs=1, num_gpus=0,
        logprobs_mode="processed_logprobs", distributed_executor_backend="uni",
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
    )  # fmt: skip

    async def nothing_to_load(*args, **more):
        return None

    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=12, ignore_eos=True, logprobs=1, seed=0)
    given = {"label": "", "sampling_params": params, "max_length": 64, "hf_tokenizer": tokenizer}
    try:
        first = await actor.generate_responses("1+2=", num_samples=2, **given)
        actor.llm.collective_rpc = nothing_to_load
        for is_last in (False, True):
            await actor.update_weight("name", torch.float32, (1,), empty_cache=is_last)
        return [*first, *await actor.generate_responses("3+4=", num_samples=1, **given)]
    finally:
        actor.llm.shutdown()


def test_a_response_carries_the_distribution_that_vllm_drew_from_and_the_version_of_its_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_REGION", f'{{"preset": "dppo-topk-tv", "divergence": {{"k": {K}}}}}')
    monkeypatch.setenv("RAY_ADDRESS", "unused")  # OpenRLHF would look for the cluster's
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    save_model(tmp_path, tied=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    drawn = asyncio.run(responses(tmp_path, AutoTokenizer.from_pretrained(tmp_path)))
    for response, version in zip(drawn, (0, 0, 1), strict=True):
        row, ((start, end),) = response["mm_train_inputs"][SAMPLED], response["action_ranges"]
        assert row.version.tolist() == [version] * (end - start)
        tokens = torch.tensor([response["observation_tokens"]])
        with torch.no_grad():
            whole = (model(tokens).logits[0, start - 1 : end - 1] / TEMPERATURE).log_softmax(-1)
        for at, ids in enumerate(row.kept.rows()):
            kept = torch.from_numpy(ids.astype("int64"))
            mass = whole[at, kept].logsumexp(0)
            assert mass.exp() >= TOP_P - 1e-4
            assert mass.exp() - whole[at, kept].min().exp() < TOP_P + 1e-4  # no id too many
            said = response["rollout_log_probs"][start + at]
            assert abs(said - (whole[at, tokens[0, start + at]] - mass)) < LARGEST_ERROR
            known = row.topk_logp[at] > -torch.inf
            assert known.sum() == min(K, len(ids))
            listed = torch.from_numpy(row.topk_ids[at][known].astype("int64"))
            logp = torch.from_numpy(row.topk_logp[at][known])
            assert (whole[at, listed] - mass - logp).abs().max() < LARGEST_ERROR
            assert set(listed.tolist()) <= set(ids.tolist())
    assert len({len(ids) for response in drawn for ids in response["mm_train_inputs"][SAMPLED].kept.rows()}) > 1
