"""Two steps of TRL's GRPOTrainer with a colocated sampler; prints one JSON object per rollout, and TRL's log. Run by `test_grpo.py`."""

import json
import sys
from pathlib import Path

from trustrl.engines.vllm import cpu_options, extra_llm_options, install_sync, score_rollout, set_cpu_environment

if __name__ == "__main__":  # importing this file must change nothing
    set_cpu_environment()  # before trl imports vllm

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from support.tiny_models import save_model
from trustrl.engines.trl import record


class Watched(GRPOTrainer):
    """Stock TRL; afterwards, what the sampler recorded is held against the trainer's full softmax."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        asked, answered = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(batch["prompt_ids"], asked, strict=True)]
        completions = [ids[mask].tolist() for ids, mask in zip(batch["completion_ids"], answered, strict=True)]
        scores = score_rollout(
            self.vllm_generation,
            [p + c for p, c in zip(prompts, completions, strict=True)],
            [len(p) for p in prompts],
            k=64,
        )
        recorded = batch["sampling_per_token_logps"]
        truth, raw = (self.full_softmax(batch, temperature) for temperature in (self.temperature, 1.0))
        own = truth.gather(-1, batch["completion_ids"][..., None])[..., 0]
        at_top = raw.gather(-1, scores.top_ids.clamp(min=0))
        report = {
            "num_tokens": int(answered.sum()),
            "same_tokens": bool(torch.equal(scores.valid, answered)),
            "gap": (recorded - own)[answered].abs().max().item(),
            "top_gap": (scores.top_logp - at_top)[answered].abs().max().item(),
            "untempered_gap": (scores.logp - own)[answered].abs().max().item(),
            "head": self.model.get_output_embeddings().weight.sum().item(),
            "sync_seconds": self.vllm_generation.sync_weights.last.seconds,
            "sync_gap": self.vllm_generation.sync_weights.last.max_gap,
        }
        print("REPORT " + json.dumps(report), flush=True)
        return batch

    @torch.no_grad()
    def full_softmax(self, batch, temperature):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, -1)


def main(folder: Path) -> None:
    tokenizer = save_model(folder / "model", tied=True)
    settings = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=64, temperature=0.7, max_steps=2, logging_steps=1,
        max_completion_length=16, per_device_train_batch_size=8, num_generations=4, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    with extra_llm_options(max_logprobs=64, **cpu_options(dtype="float32", kv_cache_memory_bytes=1 << 26)):
        trainer = Watched(
            model=str(folder / "model"),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+2=", "30+4=", "7+5="] * 4}),
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            processing_class=tokenizer,
        )
    install_sync(trainer.vllm_generation, verify_within=1e-3)
    record(trainer, region="dppo-binary-tv")
    trainer.train()
    print("LOG " + json.dumps(trainer.state.log_history[:2]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
