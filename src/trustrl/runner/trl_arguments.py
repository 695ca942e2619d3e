"""Arguments for TRL that a recipe determines: fields of `GRPOConfig`, and the trainer's other arguments."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import SETTINGS
from trustrl.errors import ConfigError
from trustrl.registry import nearest
from trustrl.runner import trackers
from trustrl.runner.algorithm_tables import TRL_REDUCTIONS
from trustrl.runner.policy_roles import behavior_of
from trustrl.runner.recipe import Recipe

PROBE = 64
"""Smallest context length for vLLM: room for the sequence that the start-up check scores."""


def grpo_fields(recipe: Recipe, output: str) -> dict[str, Any]:
    """Returns every field of `GRPOConfig` that the recipe determines. `engine.settings` override them."""
    schedule, engine = recipe.schedule, recipe.engine
    share = schedule.sequences_per_step // engine.ranks
    rows = engine.micro_batch or share
    accumulated = share // rows
    split = schedule.update_sees == "part"
    fields: dict[str, Any] = {
        "output_dir": output,
        "run_name": recipe.name,
        "seed": schedule.seed,
        "use_cpu": engine.device == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": recipe.model.dtype},
        "max_steps": schedule.steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": accumulated * (schedule.updates_per_batch if split else 1),
        "num_iterations": 1 if split else schedule.updates_per_batch,
        "num_generations": schedule.completions_per_prompt,
        "max_completion_length": schedule.max_completion_tokens,
        "temperature": recipe.sampler.temperature,
        "learning_rate": recipe.optimiser.learning_rate,
        "lr_scheduler_type": recipe.optimiser.schedule,
        "warmup_steps": recipe.optimiser.warmup_steps,
        "weight_decay": recipe.optimiser.weight_decay,
        "max_grad_norm": recipe.optimiser.max_grad_norm,
        # A region defined per sequence fixes the average; for the other regions all tokens weigh the same.
        "loss_type": TRL_REDUCTIONS[recipe.loss.chosen(recipe.region.needs().reduction)],
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": schedule.save_every,
        "save_total_limit": 2,
        "report_to": [] if recipe.logging.tracker is None else [recipe.logging.tracker],
        "disable_tqdm": True,
    }
    if not recipe.advantage.divide_by_std:
        fields["scale_rewards"] = "none"
    if recipe.loss.kl:
        fields["beta"] = recipe.loss.kl
    if recipe.logging.tracker == "trackio":
        fields |= {"project": trackers.PROJECT, "trackio_space_id": None}  # None stays on this machine
    if recipe.sampler.kind == "vllm":
        fields |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": max(schedule.max_prompt_tokens + schedule.max_completion_tokens + 1, PROBE),
            "vllm_tensor_parallel_size": recipe.sampler.ranks,
            **({} if (share := recipe.sampler.memory_share) is None else {"vllm_gpu_memory_utilization": share}),
            # A region anchored on the sampler already corrects for the mismatch.
            "vllm_importance_sampling_correction": "behavior" not in recipe.region.needs().anchors,
        }
    return fields | engine.settings


def check(recipe: Recipe) -> None:
    """Raises if the adapter would refuse the recipe's settings. Checks the adapter's own rows, without importing TRL.

    Raises:
        ConfigError: If a setting is refused. The message names TRL's setting and the fix.
    """
    trackers.refuse_two(recipe, "report_to", recipe.engine.settings)
    known = config_fields()
    for name in recipe.engine.settings if known else ():
        if name not in known:
            raise ConfigError(
                f"engine.settings must be fields of TRL's GRPOConfig, got {name!r}.{nearest(name, known)}"
            )
    newest = (sys.maxsize,)  # a plan does not need TRL; the adapter checks the release
    values = {"trl": newest, "region": recipe.region, **grpo_fields(recipe, ""), **trainer_arguments(recipe)}
    rows.check(
        SETTINGS, lambda name, default=None: default if values.get(name) is None else values[name], recipe.region
    )


def config_fields() -> list[str]:
    """Returns the fields of the installed `GRPOConfig`, read from its source, or nothing if TRL is not installed.

    Importing TRL would take seconds and needs torch.
    """
    folders = {name: spec.origin for name in ("trl", "transformers") if (spec := find_spec(name)) and spec.origin}
    if len(folders) < 2:
        return []
    trl, transformers = (Path(origin).parent for origin in folders.values())
    files = [*(trl / "trainer").glob("*_config.py"), transformers / "training_args.py"]
    classes = {
        node.name: node for file in files for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    fields: list[str] = []
    waiting = ["GRPOConfig"]
    while waiting and (node := classes.get(waiting.pop())):
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        fields += [
            entry.target.id for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        ]  # fmt: skip
    return fields


def lora_fields(recipe: Recipe) -> dict[str, Any] | None:
    """Returns the fields of PEFT's `LoraConfig`, or None if all weights are trained."""
    lora = recipe.lora
    if lora is None:
        return None
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return {"r": lora.rank, "lora_alpha": lora.scale, "target_modules": targets, "task_type": "CAUSAL_LM"}


def trainer_arguments(recipe: Recipe) -> dict[str, Any]:
    """Returns the arguments of `TrustRegionGRPOTrainer` that TRL's trainer lacks, except `region` and `recording`."""
    arguments: dict[str, Any] = {"behavior": behavior_of(recipe), "metrics": recipe.logging.metrics}
    if recipe.sampler.kind == "vllm":
        arguments |= {"measure_mismatch": True, "vllm_options": {"dtype": recipe.sampler.dtype}}
    return arguments
