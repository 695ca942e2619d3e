"""Runs of a few steps of our trainer with a colocated vLLM, one after the other in one process. See test_regions.py.

Prints one JSON object per rollout and per step, and the error of a run that fails.
"""

import json
import sys
import traceback
from pathlib import Path

from trustrl.engines.vllm import set_cpu_environment

if __name__ == "__main__":  # importing this file must change nothing
    set_cpu_environment()  # before trl imports vllm

import torch
from datasets import Dataset
from trl import GRPOConfig

import trustrl
from support.tiny_models import save_model
from trustrl.engines.trl import TrustRegionGRPOTrainer


class Watched(TrustRegionGRPOTrainer):
    """Holds what was recorded against the trainer's whole distribution at the weights that sampled."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        on = batch["completion_mask"].bool()
        truth = self.log_softmax(batch)
        sampled = truth.gather(-1, batch["completion_ids"][..., None])[..., 0]
        report = {"step": self.state.global_step, "keys": sorted(k for k in batch if k.startswith("trustrl_"))}
        if "trustrl_behavior_logp" in batch:
            gap = (batch["trustrl_behavior_logp"] - sampled)[on].abs()
            report |= {"gap_mean": gap.mean().item(), "gap_max": gap.max().item()}
        if "trustrl_topk_ids" in batch:
            ids = batch["trustrl_topk_ids"].long()
            gap = (batch["trustrl_topk_logp"] - truth.gather(-1, ids.clamp(min=0)))[on].abs()
            report |= {"top_gap_mean": gap.mean().item(), "top_gap_max": gap.max().item(), "k": ids.shape[-1]}
        print("ROLLOUT " + json.dumps(report), flush=True)
        return batch

    @torch.no_grad()
    def log_softmax(self, batch):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
        return torch.log_softmax(logits.float() / self.temperature, -1)


KEPT = []  # a collected engine would take the process groups of all others with it


def train(folder, options):
    path = Path(folder) / "model"
    tokenizer = save_model(path, tied=options["tied"], experts=options.get("experts", 0))
    region = trustrl.config_from_dict(options["region"])
    settings = GRPOConfig(
        output_dir=str(Path(folder) / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=8, num_generations=4, num_iterations=2,
        max_steps=options.get("steps", 4), max_completion_length=8, learning_rate=options.get("lr", 1e-2), logging_steps=1, disable_tqdm=True,
        save_strategy="no", use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64,
        router_aux_loss_coef=0.0 if options.get("experts") else None,
        temperature=options.get("temperature", 1.0), vllm_importance_sampling_correction=options.get("correction", False),
    )  # fmt: skip
    trainer = Watched(
        model=str(path),
        reward_funcs=lambda completions, **_: [float(len(text) % 3) + text.count("e") for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [f"a{i}+b" for i in range(16)]}),
        processing_class=tokenizer,
        region=region,
        measure_mismatch=options.get("mismatch", False),
        vllm_options={"dtype": options["dtype"], "kv_cache_memory_bytes": 1 << 26},
    )
    KEPT.append(trainer)
    if options.get("break_sync"):
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    for log in trainer.state.log_history:
        if "trustrl/tokens" in log:
            print("STEP " + json.dumps({k: v for k, v in log.items() if isinstance(v, float | int)}), flush=True)


if __name__ == "__main__":
    for number, (name, given) in enumerate(json.loads(sys.argv[2]).items()):
        print("RUN " + json.dumps(name), flush=True)
        try:
            train(Path(sys.argv[1]) / str(number), given)
        except Exception:
            print("ERROR " + json.dumps(traceback.format_exc()), flush=True)
