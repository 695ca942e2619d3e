"""A stock TRL run of six steps on a tiny model: `python -m support.stock_trl_run OUT tensorboard wandb ...`."""

import sys

from datasets import Dataset
from trl import GRPOTrainer

from support.trl_world import settings, tiny_model, tokenizer

STEPS, UPDATES, GROUP = 6, 2, 3


def length(completions, **_):
    return [len(completion) / 24 for completion in completions]


def letters(completions, **_):
    return [sum(letter.isalpha() for letter in completion) / 24 for completion in completions]


def train(out, *trackers, **more):
    """Trains with two reward functions, completions logged, and an evaluation every three steps."""
    args = settings(
        output_dir=str(out), max_steps=STEPS, logging_steps=1, save_strategy="steps", save_steps=4, learning_rate=1e-3,
        log_completions=True, num_iterations=UPDATES, num_generations=GROUP, eval_strategy="steps", eval_steps=3,
        report_to=list(trackers), temperature=0.9, top_k=50, **more,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})
    trainer = GRPOTrainer(
        model=tiny_model(), reward_funcs=[length, letters], args=args, train_dataset=data,
        eval_dataset=data.select(range(4)), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:])
