"""TRL 1.8.0's own DPPOTrainer, the last release that has one, asked from outside: run with that release on PYTHONPATH.

    python dppo_oracle.py FOLDER

FOLDER holds `behavior/` and `policy/` (models), `tokenizer/`, `batch.safetensors` and `jobs.json`, a list of

    {"name": ..., "settings": {DPPOConfig's}}                        gradients of one batch at the policy's weights
    {"name": ..., "settings": {...}, "generate": [[prompt ids], ...]}  a rollout at the behavior weights, and how far
                                                                     1.8.0 measures the policy to be from it

Each job writes `NAME.safetensors`. Nothing of trustrl is imported here.
"""

import json
import sys
from pathlib import Path


def trainer_at(model, settings, folder):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.dppo import DPPOConfig, DPPOTrainer

    args = DPPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        per_device_train_batch_size=6, num_generations=2, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = DPPOTrainer(
        model=str(folder / model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 12}),
        processing_class=AutoTokenizer.from_pretrained(str(folder / "tokenizer")),
    )
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.model.float()
    return trainer


def gradient(settings, folder):
    from safetensors.torch import load_file

    trainer = trainer_at("policy", settings, folder)
    trainer.model.train()
    trainer._compute_loss(trainer.model, load_file(folder / "batch.safetensors")).backward()
    found = {name: p.grad.contiguous() for name, p in trainer.model.named_parameters()}
    return found | {f"masked_{sign}": masked_share(trainer, sign) for sign in ("positive", "negative")}


def masked_share(trainer, sign):
    """Of all tokens, those masked with an advantage of this sign. (Its overall share counts A = 0 as masked too.)"""
    import torch

    return torch.tensor(trainer._metrics["train"][f"mask_ratio/{sign}_adv_mean"][-1])


def rollout(settings, prompts, folder):
    """What 1.8.0 records while it generates, and the divergence its mask compares with a threshold."""
    import torch

    torch.manual_seed(0)
    trainer = trainer_at("behavior", settings, folder)
    trainer.model.eval()
    prompts, completions, logps, top_logps, top_ids = trainer._generate_single_turn(prompts, None, {})
    length = max(map(len, completions))
    rows = range(len(completions))

    def padded(parts, value, left=False):
        width = max(map(len, parts))
        filled = [
            [value] * (width - len(part)) + part if left else part + [value] * (width - len(part)) for part in parts
        ]
        return torch.tensor(filled)

    nothing = [0.0] * settings["divergence_topk"]
    batch = {
        "prompt_ids": padded(prompts, 0, left=True),
        "prompt_mask": padded([[1] * len(part) for part in prompts], 0, left=True),
        "completion_ids": padded(completions, 0),
        "completion_mask": padded([[1] * len(part) for part in completions], 0),
        "sampling_per_token_logps": padded(logps, 0.0),
        "sampling_topk_logps": padded(top_logps, nothing),
        "sampling_topk_token_ids": padded(top_ids, [int(x) for x in nothing]),
    }
    assert batch["completion_ids"].shape == (len(rows), length)
    return batch | {"divergence": divergence(trainer_at("policy", settings, folder), batch)}


def divergence(trainer, batch):
    """By halving: the mask tells only whether it is above a threshold, which may differ from token to token."""
    import torch

    with torch.no_grad():
        logps, _, top = trainer._get_per_token_logps_with_topk(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch["sampling_topk_token_ids"],
        )
    outward = torch.sign(logps - batch["sampling_per_token_logps"])
    low, high = torch.zeros_like(logps), torch.full_like(logps, 20.0)
    for _ in range(40):
        middle = (low + high) / 2
        trainer.epsilon_low = trainer.epsilon_high = middle
        kept = trainer._compute_divergence_mask(
            logps, batch["sampling_per_token_logps"], outward, torch.ones_like(logps), top, batch["sampling_topk_logps"]
        )
        low, high = torch.where(kept == 1, low, middle), torch.where(kept == 1, middle, high)
    return high


def main(folder):
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    for job in json.loads((folder / "jobs.json").read_text()):
        if "generate" in job:
            found = rollout(job["settings"], job["generate"], folder)
        else:
            found = gradient(job["settings"], folder)
        save_file(found, folder / f"{job['name']}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
