"""Records for the guides on `trustrl audit` and `trustrl calibrate`: TRL, a tiny model, eight updates from each batch.

    python benchmarks/audit_records.py --out runs/adding [--sampler vllm]

`transformers` samples with the trainer's own network; `vllm` samples in bf16 against fp32 training, a real mismatch.
Two to five minutes on one core. vLLM on a CPU needs the environment that docs/engines/trl.md describes.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import trustrl
from trustrl import models, tasks
from trustrl.recording import Recording, read

UPDATES, ROWS, COMPLETIONS = 8, 128, 8


def trainer(out: Path, sampler: str, batches: int):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from trustrl.engines.trl import TrustRegionGRPOTrainer

    folder, task = models.path("tiny"), tasks.load("arithmetic")
    theirs, ours = {}, {"behavior": "trainer"}
    if sampler == "vllm":
        theirs = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64,
            "vllm_importance_sampling_correction": False,
        }  # fmt: skip
        ours = {"behavior": "sampler", "measure_mismatch": True, "vllm_options": {"dtype": "bfloat16"}}
    settings = GRPOConfig(
        output_dir=str(out / "checkpoints"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, per_device_train_batch_size=ROWS,
        num_generations=COMPLETIONS, max_completion_length=4, num_iterations=UPDATES, learning_rate=3e-4,
        loss_type="dapo", max_steps=batches * UPDATES, **theirs,
    )  # fmt: skip
    return TrustRegionGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder), processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=task.reward, args=settings, train_dataset=task.dataset("train", count=2000),
        region=trustrl.preset("dppo-binary-tv"), recording=Recording(folder=out / "records", sample=1.0), **ours,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sampler", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--batches", type=int, default=10, help="batches of rollouts (10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer(options.out, options.sampler, options.batches).train()
    print(f"{len(read(options.out / 'records').table)} rows in {options.out / 'records'}", file=sys.stderr)


if __name__ == "__main__":
    main()
