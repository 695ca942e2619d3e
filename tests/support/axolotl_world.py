"""A tiny world for axolotl: a YAML file with a model and prompts, and a trainer on a batch whose log-probs are given."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import torch
import yaml

from support import tiny_models, trl_world

STEPS = 8
REWARDS = '''"""Rewards and prompts for a run of axolotl."""


def odd_letters(prompts, completions, **_):
    return [sum(ord(letter) % 2 for letter in text) / max(1, len(text)) for text in completions]


def prompts_alone(cfg, *args, **kwargs):
    return lambda example, tokenizer=None: {"prompt": example["prompt"]}
'''


def settings(**more):
    """A YAML file's settings; `trl` and `trust_region_options` are merged with the usual ones."""
    usual = {
        "base_model": "./model", "rl": "grpo", "plugins": ["trustrl.engines.axolotl.TrustRegionPlugin"],
        "trainer_cls": "trustrl.engines.axolotl.TrustRegionTrainer", "trust_region": "dppo-binary-tv",
        "trust_region_options": {"behavior": "trainer"},
        "trl": {
            "beta": 0.0, "max_completion_length": 8, "num_generations": 4, "num_iterations": 4,
            "reward_funcs": ["axolotl_rewards.odd_letters"],
        },
        "datasets": [
            {"path": "./prompts.jsonl", "ds_type": "json", "split": "train", "type": "axolotl_rewards.prompts_alone"}
        ],
        "output_dir": "./out", "dataset_prepared_path": "./prepared", "sequence_len": 64, "micro_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1,
        "learning_rate": 3e-3, "optimizer": "adamw_torch", "lr_scheduler": "constant", "bf16": False, "fp16": False,
        "tf32": False, "gradient_checkpointing": False, "dataset_num_proc": 1, "seed": 0,
    }  # fmt: skip
    merged = {key: usual[key] | more.pop(key) for key in ("trl", "trust_region_options") if key in more}
    return usual | more | merged


def write(folder, **more):
    """Writes everything that `axolotl train` needs; returns the YAML file."""
    tiny_models.save_model(folder / "model", tied=False)
    prompts = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(4) for b in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (folder / "axolotl_rewards.py").write_text(REWARDS)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings(**more)))
    return file


def train(file):
    """Runs `axolotl train` without its launcher; returns the finished process."""
    path = os.pathsep.join([str(file.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": path}
    command = [sys.executable, "-m", "axolotl.cli.train", file.name]
    return subprocess.run(command, cwd=file.parent, env=os.environ | alone, capture_output=True, text=True, check=False)


def state(file):
    """The trainer's state in the checkpoint at the end."""
    return json.loads((file.parent / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())


def trained(file):
    """The log of each step."""
    return [line for line in state(file)["log_history"] if "loss" in line]


def stored_region(file):
    """The region's settings in the checkpoint."""
    return state(file)["stateful_callbacks"]["trustrl_region"]


def trainer(cls, folder, *, loss_type="dapo", model=None, temperature=1.0, **more):
    """One of axolotl's trainers on `trl_world`'s prompts, with axolotl's arguments."""
    from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig

    args = AxolotlGRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        per_device_train_batch_size=6, num_generations=2, num_iterations=2, max_completion_length=12,
        loss_type=loss_type, disable_tqdm=True, save_strategy="no", temperature=temperature,
    )  # fmt: skip
    return trl_world.trainer_of(cls, model or trl_world.tiny_model(), args, **more)


class GivenLogProbs(torch.nn.Module):
    """A model of two tokens that gives token 0 the log-probs in `logp`, and the rest to token 1."""

    def __init__(self, logp):
        super().__init__()
        self.logp = logp

    def forward(self, input_ids, **_):
        logp = self.logp.double()
        steps = torch.stack([logp, torch.log(-torch.expm1(logp))], dim=-1)
        before = input_ids.shape[1] - logp.shape[1]
        # The logits at a position are those of the next token.
        return SimpleNamespace(logits=torch.nn.functional.pad(steps, (0, 0, before - 1, 1)))


def gradient(trainer, batch, *, inputs):
    """The gradient of the trainer's loss by `batch.logp`, through the trainer's own loss.

    `inputs` are the tensors that name μ: the mixin's, or those of the stock trainer.
    """
    ids = torch.zeros(batch.logp.shape, dtype=torch.long)
    prompt = torch.ones(len(ids), 2, dtype=torch.long)
    made = {
        "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids,
        "completion_mask": torch.ones_like(ids), "tool_mask": batch.in_loss.int(),
        "advantages": batch.advantage[:, 0], "num_items_in_batch": batch.in_loss.sum(), **inputs,
    }  # fmt: skip
    trainer.model.train()
    loss = trainer._compute_loss(GivenLogProbs(batch.logp), made)
    (found,) = torch.autograd.grad(loss, batch.logp)
    return found
