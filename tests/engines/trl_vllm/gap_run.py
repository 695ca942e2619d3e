"""Prints `SamplerCheck`'s metrics for a bf16 and a float32 vLLM. See test_sampler_check.py.

The trainer is a stub with the attributes that the check reads; vLLM and the rollouts are real. On a CPU without bf16
instructions, and on one thread, decode and prefill round differently only after long prompts.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import torch
from vllm import LLM, SamplingParams

from support.tiny_models import save_model, some_sequences
from trustrl.engines.trl import sampler as sampler_check
from trustrl.engines.trl.anchors import RECORDED
from trustrl.engines.trl.sampler import SamplerCheck
from trustrl.engines.vllm.options import cpu_options

TOKENS, PROMPTS, ROOM = 64, (1000, 9, 1500, 9, 1800), 2048
sampler_check.LONGEST = ROOM


def rollout(llm, number):
    """One sampled completion in TRL's layout, with a prompt that is padded on the left."""
    (prompt,) = some_sequences(PROMPTS[number])
    how = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False, seed=1)
    found = llm.generate([{"prompt_token_ids": prompt}], sampling_params=how, use_tqdm=False)[0].outputs[0]
    logp = [at[token].logprob for token, at in zip(found.token_ids, found.logprobs, strict=True)]
    return {
        "prompt_ids": torch.tensor([[0, 0, *prompt]]),
        "prompt_mask": torch.tensor([[0, 0] + [1] * len(prompt)]),
        "completion_ids": torch.tensor([[*found.token_ids, 0]]),
        "completion_mask": torch.tensor([[1] * TOKENS + [0]]),
        RECORDED: torch.tensor([[*logp, 0.0]]),
    }


def trainer_of(llm, **settings):
    generation = SimpleNamespace(llm=llm, mode="colocate", enable_sleep_mode=False, tensor_parallel_size=1)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "use_vllm": True}
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x)
    metrics = {"train": defaultdict(list)}
    return SimpleNamespace(vllm_generation=generation, accelerator=accelerator, _metrics=metrics, **plain | settings)


def main(folder):
    save_model(folder, tied=True)
    settings = Path(folder) / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_position_embeddings": ROOM}))
    kept, found = [], {}
    for dtype in ("bfloat16", "float32"):
        options = cpu_options(dtype=dtype, kv_cache_memory_bytes=1 << 27)
        llm = LLM(folder, max_model_len=ROOM, logprobs_mode="processed_logprobs", seed=0, **options)
        kept.append(llm)
        trainer, other, check = trainer_of(llm), trainer_of(llm, temperature=0.7), SamplerCheck(2)
        for number in range(5):
            check.run(trainer, rollout(llm, number))
        SamplerCheck(1).run(other, rollout(llm, 0))
        never = trainer_of(llm)
        SamplerCheck(0).run(never, rollout(llm, 0))
        wrong = rollout(llm, 0)
        wrong[RECORDED] = wrong[RECORDED] + 0.25
        SamplerCheck(1).run(shifted := trainer_of(llm), wrong)
        found[dtype] = {
            "metrics": trainer._metrics["train"], "another temperature": other._metrics["train"],
            "never": never._metrics["train"], "shifted by 0.25": shifted._metrics["train"],
        }  # fmt: skip
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
