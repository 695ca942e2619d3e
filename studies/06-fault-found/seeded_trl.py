"""Seeded faults in TRL: a trainer of `trustrl run`, or TRL's own trainer, with one fault.

    python studies/06-fault-found/seeded_trl.py NAME FOLDER

The start-up checks of trustrl's trainer would reject most of these faults before the first step, so they are disabled
in runs with a fault.
"""

import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from seeded_runs import PLAIN, RUNS, seed_of

from trustrl.runner.recipe import Recipe, load

RECIPES = Path(__file__).parents[2] / "recipes"
SIZE = [
    "schedule.steps=40",
    "schedule.checkpoint_every=40",
    "schedule.prompts_per_step=8",
    "evaluation.count=200",
]

FIELDS = ("logging_steps=", "mask_truncated_completions=")
"""Settings of stock TRL that no recipe has."""


def seed_fault(trainer: Any, fault: dict[str, Any], draw: random.Random) -> None:
    """Breaks a trainer before it trains."""
    if "synced_every" in fault:
        sync_seldom(trainer, fault["synced_every"])
    for name in ("temperature", "top_p"):
        if name in fault:
            if not hasattr(trainer.vllm_generation, name):
                raise SystemExit(f"TRL's VLLMGeneration has no {name}.")
            setattr(trainer.vllm_generation, name, fault[name])
    if "head_noise" in fault:
        leave_head_behind(trainer, fault["head_noise"])
    if {"nan_share", "nan_step", "reward"} & {*fault}:
        break_reward(trainer, fault, draw)


def sync_seldom(trainer: Any, every: int) -> None:
    """Syncs weights to the sampler before the first batch, and then only at every n-th sync, or never if it is 0."""
    sync, calls = trainer.vllm_generation.sync_weights, 0

    def seldom() -> None:
        nonlocal calls
        if calls == 0 or (every and calls % every == 0):
            sync()
        calls += 1

    trainer.vllm_generation.sync_weights = seldom


def leave_head_behind(trainer: Any, noise: float) -> None:
    """Stops weight syncs from updating vLLM's copy of a tied head, which is off by noise from the start."""
    from trustrl.engines.vllm import weight_reload

    model = weight_reload.model_runner_of(trainer.vllm_generation.llm).model
    heads = weight_reload.tied_heads(model)
    if not heads:
        raise SystemExit("This model has no tied head.")
    draw = torch.Generator().manual_seed(0)
    for head in heads:
        kept = head.weight.data.clone()
        other = torch.randn(kept.shape, generator=draw).to(kept) * kept.float().std().to(kept)
        head.weight.data.copy_(kept + noise * other)
        head.quant_method.process_weights_after_loading(head)  # packs a copy
        head.weight.data.copy_(kept)
    weight_reload.tied_heads = lambda model: []


def break_reward(trainer: Any, fault: dict[str, Any], draw: random.Random) -> None:
    """Sets all rewards to 0 from a step on, or some to NaN."""
    (reward,) = trainer.reward_funcs

    def broken(*args: Any, **kwargs: Any) -> list[float]:
        step, found = kwargs["trainer_state"].global_step, reward(*args, **kwargs)
        if fault.get("reward") == "constant" and step >= fault.get("from_step", 0):
            return [0.0 for _ in found]
        if step == fault.get("nan_step"):
            return [float("nan") for _ in found]
        return [float("nan") if draw.random() < fault.get("nan_share", 0.0) else one for one in found]

    trainer.reward_funcs[0] = broken


def recipe_from(settings: Sequence[str], name: str, seed: int, size: Sequence[str]) -> tuple[Recipe, dict[str, int]]:
    """Returns a recipe, and the settings of TRL that are no part of one."""
    mine = [one for one in settings if not one.startswith(FIELDS)]
    base = "tour" if PLAIN in mine else "mismatch"
    chosen = [*size, *mine, f"name={name}", f"schedule.seed={seed}"]
    if base == "tour" and not any("updates_per_batch" in one for one in mine):
        chosen.append("schedule.updates_per_batch=2")
    fields = {key: int(value) for key, value in (one.split("=") for one in settings if one not in mine)}
    return load(str(RECIPES / f"{base}.toml"), chosen), fields


def recipe_of(name: str) -> tuple[Recipe, dict[str, int]]:
    return recipe_from(RUNS[name].settings, name, seed_of(name), SIZE)


def make(name: str, folder: Path) -> None:
    """Makes a run of `trustrl run` in this process."""
    from trustrl.runner import trl_run
    from trustrl.runner.run_recipe import run

    recipe, _ = recipe_of(name)
    fault = RUNS[name].fault
    if fault:
        build, arguments = trl_run._trainer, trl_run.trainer_arguments

        def broken(*args: Any) -> Any:
            trainer = build(*args)
            seed_fault(trainer, fault, random.Random(seed_of(name)))
            return trainer

        trl_run._trainer = broken
        trl_run.trainer_arguments = lambda recipe: {**arguments(recipe), "startup_checks": False}
    run(recipe, folder, resume=True)


def stock_trainer(recipe: Recipe, folder: Path, fields: dict[str, Any], problems: int, copies: int = 1) -> Any:
    """Returns TRL's own trainer with TRL's own loss, on some problems, each of them several times in the data."""
    from trustrl.runner.processes import take_a_port
    from trustrl.runner.trl_arguments import grpo_fields
    from trustrl.world import models, tasks

    take_a_port()
    options: Any = nullcontext()
    if recipe.sampler.kind == "vllm":
        from trustrl.engines.vllm.options import cpu_options, extra_llm_options, set_cpu_environment

        set_cpu_environment()  # before vllm is imported
        options = extra_llm_options(**cpu_options(dtype=recipe.sampler.dtype))
    from datasets import concatenate_datasets
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    arguments = grpo_fields(recipe, str(folder)) | {"loss_type": "dapo"}
    arguments.pop("vllm_importance_sampling_correction", None)
    task, path = tasks.load(recipe.task.name), models.path(recipe.model.name)
    data = task.dataset("train", problems, recipe.schedule.seed, recipe.task.chat)
    with options:
        trainer = GRPOTrainer(
            model=path, reward_funcs=task.reward, args=GRPOConfig(**arguments | fields),
            train_dataset=concatenate_datasets([data] * copies),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        )  # fmt: skip
    if recipe.sampler.kind == "vllm":
        from trustrl.engines.vllm.weight_reload import install_sync

        install_sync(trainer.vllm_generation)  # on a CPU, TRL's own sync fails
    return trainer


def make_stock(name: str, folder: Path) -> None:
    """Makes a run of TRL's own trainer with TRL's own loss."""
    recipe, fields = recipe_of(name)
    trainer = stock_trainer(recipe, folder, fields, recipe.task.problems)
    seed_fault(trainer, RUNS[name].fault, random.Random(seed_of(name)))
    trainer.train()


if __name__ == "__main__":
    chosen, where = sys.argv[1], Path(sys.argv[2])
    (make_stock if RUNS[chosen].engine == "stock trl" else make)(chosen, where)
