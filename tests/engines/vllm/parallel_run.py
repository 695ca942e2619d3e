"""Two ranks that share one sampler, each with sequences of its own. Run by `test_parallel.py` under torchrun."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from trustrl.engines.vllm import cpu_options, extra_llm_options, install_sync, score_rollout, set_cpu_environment

if __name__ == "__main__":  # importing this file must change nothing
    set_cpu_environment()  # before trl imports vllm

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from support.tiny_models import LONGEST, character_tokenizer, full_logps, perturb, save_model, some_sequences

K = 4


class TransformersServer:
    """Answers as TRL's `VLLMClient` does, with transformers behind it."""

    def __init__(self, model):
        self.model = model

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs):
        answer = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            truth = full_logps(self.model, ids)[start - 1 :]
            best = truth.topk(top_logprobs)
            answer["logprobs"].append(best.values.tolist())
            answer["logprob_token_ids"].append(best.indices.tolist())
            answer["actual_logprobs"].append(truth.gather(-1, torch.tensor(ids[start:])[:, None]).tolist())
        return answer


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == 0:
        save_model(folder / "model", tied=True)
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    with extra_llm_options(**cpu_options(kv_cache_memory_bytes=1 << 26)):
        parallel = VLLMGeneration(
            model,
            accelerator,
            character_tokenizer(),
            mode="colocate",
            max_model_length=LONGEST,
            tensor_parallel_size=2,
        )
    sync = install_sync(parallel, verify_within=1e-3)
    torch.manual_seed(0)  # both ranks move alike, as data-parallel trainers do
    perturb(model)
    parallel.sync_weights()

    sequences = some_sequences(5, 40, seed=7) if rank == 0 else some_sequences(6, seed=9)
    client = TransformersServer(model) if rank == 0 else None
    served = SimpleNamespace(mode="server", vllm_client=client, accelerator=accelerator)
    report = {"rank": rank, "sync_gap": sync.last.max_gap}
    for name, generation in (("parallel", parallel), ("served", served)):
        scores = score_rollout(generation, sequences, [1] * len(sequences), K)
        gaps = [
            (scores.top_logp[row, : len(ids) - 1] - full_logps(model, ids).topk(K).values).abs().max()
            for row, ids in enumerate(sequences)
        ]
        report[name] = {"shape": list(scores.logp.shape), "gap": torch.stack(gaps).max().item()}
    print("REPORT " + json.dumps(report), flush=True)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
