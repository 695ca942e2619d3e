"""A small run of ms-swift: an untrained tiny model, problems, a reward plugin, and its command line."""

import json
from pathlib import Path

PLUGIN = '''
import trustrl.engines.swift
from swift.rewards import ORM, orms


class Digits(ORM):
    """The share of digits in a completion."""

    def __call__(self, completions, **kwargs):
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


orms["digits"] = Digits
'''
VOCABULARY = 512


def write(folder):
    """Writes the model, the dataset and the plugin; returns the arguments of `swift rlhf` that name them."""
    from trustrl.world.models import tiny

    folder = Path(folder)
    model = folder / "model"
    tiny.model(tiny.Tiny(num_layers=1, hidden_size=64)).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    rows = [{"messages": [{"role": "user", "content": f"{n} + {n + 1}"}]} for n in range(32)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plugin.py").write_text(PLUGIN)
    given = {
        "rlhf_type": "grpo", "model": model, "model_type": "qwen3", "template": "qwen3_nothinking", "dataset": folder / "problems.jsonl",
        "external_plugins": folder / "plugin.py", "reward_funcs": "digits", "output_dir": folder / "out",
        "add_version": "false", "tuner_type": "full", "torch_dtype": "float32", "attn_impl": "sdpa", "use_hf": "true",
        "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1,
        "steps_per_generation": 2, "num_iterations": 2, "max_completion_length": 8, "temperature": 1.0,
        "top_k": VOCABULARY, "learning_rate": 0.01, "logging_steps": 1, "max_steps": 6, "save_strategy": "no",
        "eval_strategy": "no", "split_dataset_ratio": 0, "report_to": "none", "beta": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0,
        "gradient_checkpointing": "false", "seed": 7, "lr_scheduler_type": "constant", "warmup_ratio": 0,
    }  # fmt: skip
    return {name: str(value) for name, value in given.items()}


def command_line(given):
    """The settings as arguments of the command line."""
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def trainer_of(given):
    """The trainer that `swift rlhf` would train with."""
    from swift.pipelines.train.rlhf import SwiftRLHF

    main = SwiftRLHF(command_line(given))
    main.train = lambda trainer: trainer
    return main.run()


def logged(folder):
    """The rows of a run's log."""
    lines = (Path(folder) / "logging.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]
