"""Command line for verl that a recipe determines."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trustrl.engines.refusals import rows
from trustrl.engines.refusals.verl import ROWS
from trustrl.engines.refusals.verl_settings import ACTOR, LOSS, MEGATRON, ROLLOUT, settings_needed
from trustrl.errors import ConfigError
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset, presets
from trustrl.runner import trackers
from trustrl.runner.layout import STRATEGIES, VERL_KEYS, Layout
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_cpu_settings import DEFAULTS, PACKAGE, PLAIN_PROMPTS
from trustrl.world.verl_dataset import REWARD

TRAIN, HELD_OUT, ANSWERS = "train.parquet", "held_out.parquet", "answers"
CHECKPOINTS = "checkpoints"
CHOSEN_HERE = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
"""Settings that would make verl load a checkpoint that trustrl has not verified."""

MAX_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
PLAIN = re.compile(r"[A-Za-z0-9_./@%*?+-]*")
"""Text that needs no quotes in hydra's grammar."""

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def command(recipe: Recipe, folder: Path, model: str) -> list[str]:
    """Returns the complete command that trains in `folder`. On CPUs, the module it starts adds the CPU settings."""
    module = PACKAGE if recipe.engine.device == "cpu" else "trustrl.engines.verl"
    settings = _settings(recipe, folder, model)
    plain = [] if recipe.task.chat else [PLAIN_PROMPTS]
    return [sys.executable, "-m", module, *(f"{key}={hydra(value)}" for key, value in settings.items()), *plain]


def check(recipe: Recipe, folder: Path) -> None:
    """Raises if the adapter would refuse the recipe's command. Checks the adapter's own rows, without importing verl.

    Raises:
        ConfigError: If a setting is refused. The message names verl's setting and the fix.
    """
    trackers.refuse_two(recipe, "trainer.logger", engine_settings(recipe))
    settings = _settings(recipe, folder, recipe.model.name)
    defaults = dict(DEFAULTS) if recipe.engine.device == "cpu" else {}
    if (engine := settings.get("model_engine", "dp")) != "dp":  # verl's group of that name sets the same strategy
        defaults[f"{ACTOR}.strategy"] = engine
    config = {key.lstrip("+~"): _BOOLEANS.get(str(value), value) for key, value in (defaults | settings).items()}
    needed = settings_needed(rows.reader(_nested(config)), recipe.region)
    rows.check(ROWS, rows.reader(_nested(config | needed)), recipe.region)


_BOOLEANS = {"True": True, "False": False}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts dotted keys to nested tables."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        table = out
        for name in path:
            if not isinstance(table.get(name), dict):
                table[name] = {}
            table = table[name]
        table[last] = value
    return out


def _settings(recipe: Recipe, folder: Path, model: str) -> dict[str, Any]:
    """Returns verl's settings for the recipe. `engine.settings` override the others."""
    for key in CHOSEN_HERE:
        if key in engine_settings(recipe):
            raise ConfigError(
                f"engine.settings must leave out {key}. `trustrl run` chooses the checkpoint to load. See --resume."
            )
    return {**_from_recipe(recipe, folder, model), **dict(_flat(recipe.engine.settings))}


def _from_recipe(recipe: Recipe, folder: Path, model: str) -> dict[str, Any]:
    schedule, engine, optimiser, sampler = recipe.schedule, recipe.engine, recipe.optimiser, recipe.sampler
    updates = schedule.updates_per_batch
    on_cpu = engine.device == "cpu"
    settings: dict[str, Any] = {
        "data.train_files": folder / TRAIN,
        "data.val_files": folder / HELD_OUT,
        "data.train_batch_size": schedule.prompts_per_batch,
        "data.max_prompt_length": schedule.max_prompt_tokens,
        "data.max_response_length": schedule.max_completion_tokens,
        "data.seed": schedule.seed,
        **recipe.advantage.verl_settings(model, schedule.prompts_per_step),
        "actor_rollout_ref.model.path": model,
        f"{ROLLOUT}.name": f"{sampler.kind}_cpu" if on_cpu else sampler.kind,
        f"{ROLLOUT}.dtype": sampler.dtype,
        f"{ROLLOUT}.temperature": sampler.temperature,
        f"{ROLLOUT}.n": schedule.completions_per_prompt,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.seed": schedule.seed,
        f"{ROLLOUT}.val_kwargs.temperature": recipe.evaluation.temperature,
        f"{ROLLOUT}.val_kwargs.do_sample": recipe.evaluation.temperature > 0,
        **_if_chosen(f"{ROLLOUT}.val_kwargs.top_p", recipe.evaluation.top_p, 1.0),
        **_if_chosen(f"{ROLLOUT}.val_kwargs.n", recipe.evaluation.answers, 1),
        **_if_chosen(f"{ROLLOUT}.gpu_memory_utilization", sampler.memory_share),
        **_if_chosen(MAX_TOKENS, None if engine.micro_batch else engine.micro_batch_tokens),
        **_policy_loss(recipe, folder),
        **recipe.loss.verl_settings(recipe.region.needs().reduction, schedule.max_completion_tokens),
        f"{ACTOR}.ppo_mini_batch_size": schedule.prompts_per_step,
        f"{ACTOR}.ppo_epochs": updates if schedule.update_sees == "batch" else 1,
        f"{ACTOR}.optim.lr": optimiser.learning_rate,
        f"{ACTOR}.optim.lr_warmup_steps": optimiser.warmup_steps // updates,
        f"{ACTOR}.optim.weight_decay": optimiser.weight_decay,
        f"{ACTOR}.optim.clip_grad": optimiser.max_grad_norm,
        **_engine_settings(recipe),
        **recipe.layout.verl_settings(),
    }
    if engine.micro_batch is not None:
        settings |= {
            f"{ACTOR}.use_dynamic_bsz": False,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": engine.micro_batch,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": engine.micro_batch,
        }
    if not on_cpu:  # the CPU command sets these itself
        settings |= {
            f"{ROLLOUT}.tensor_model_parallel_size": sampler.ranks,
            f"{ACTOR}.use_dynamic_bsz": engine.micro_batch is None,
            "reward.custom_reward_function.path": REWARD["path"],
            "reward.custom_reward_function.name": REWARD["name"],
        }
    return settings | _trainer_settings(recipe, folder)


def _if_chosen(key: str, value: Any, default: Any = None) -> dict[str, Any]:
    return {} if value == default else {key: value}


def _engine_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that FSDP and Megatron name differently."""
    decay, seed = recipe.optimiser.schedule, recipe.schedule.seed
    if not layout_of(recipe).megatron:
        return {
            **(recipe.lora.verl_settings(merged=recipe.engine.device == "cpu") if recipe.lora else {}),
            f"{ACTOR}.optim.lr_scheduler_type": decay,
            f"{ACTOR}.fsdp_config.model_dtype": SHORT[recipe.model.dtype],
            f"{ACTOR}.fsdp_config.seed": seed,
        }
    if recipe.lora is not None:
        raise ConfigError(
            "layout.strategy must be 'fsdp' or 'fsdp2' with [lora] on verl, got 'megatron', for which verl ignores "
            "lora_rank and trains all weights. Choose FSDP, or remove [lora] and set actor_rollout_ref.model.lora in "
            "engine.settings."
        )
    return {
        f"{ACTOR}.optim.lr_decay_style": decay,
        f"{MEGATRON}.dtype": recipe.model.dtype,
        f"{MEGATRON}.seed": seed,
    }


def layout_of(recipe: Recipe) -> Layout:
    """Returns the layout that verl gets: [layout], unless `engine.settings` override it.

    Raises:
        ConfigError: If the result is not a valid layout.
    """
    theirs = engine_settings(recipe)
    strategy, ulysses = VERL_KEYS["strategy"], VERL_KEYS["ulysses_parallel"]
    if (engine := theirs.get("model_engine", "dp")) != "dp":  # verl's group of that name sets the same strategy
        theirs.setdefault(strategy, engine)
    if theirs.get(strategy, "fsdp") not in STRATEGIES:
        del theirs[strategy]  # verl's other engines have no layout here
    if (size := theirs.get(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")) is not None:
        theirs.setdefault(ulysses, size)  # verl accepts both
    return replace(recipe.layout, **{name: theirs[key] for name, key in VERL_KEYS.items() if key in theirs})


def computed_dtype(recipe: Recipe) -> str:
    """Returns the dtype of the trainer's forward pass. With FSDP, verl does not take it from the weights."""
    if recipe.engine.name != "verl" or layout_of(recipe).megatron:
        return recipe.model.dtype
    default = "fp32" if recipe.engine.device == "cpu" else "bf16"
    dtype = engine_settings(recipe).get(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", default)
    return next((name for name, short in SHORT.items() if dtype in (name, short)), recipe.model.dtype)


def engine_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's `engine.settings` by verl's dotted names."""
    return {key.lstrip("+"): value for key, value in _flat(recipe.engine.settings)}


def _trainer_settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Returns the settings of verl's trainer: its size, length, checkpoints and evaluations."""
    schedule, engine = recipe.schedule, recipe.engine
    updates, batches = schedule.updates_per_batch, schedule.steps // schedule.updates_per_batch
    known = recipe.task.problems  # otherwise, an epoch has at least one batch
    epochs = batches if known is None else math.ceil(batches / (known // schedule.prompts_per_batch)) + 1
    return {
        "trainer.project_name": trackers.PROJECT,
        "trainer.experiment_name": recipe.name,
        "trainer.nnodes": engine.nodes,
        "trainer.n_gpus_per_node": engine.ranks_per_node,
        "trainer.total_training_steps": batches,
        "trainer.total_epochs": epochs,
        "trainer.logger": ["console", "file", *filter(None, [recipe.logging.tracker])],
        "trainer.save_freq": schedule.save_every // updates,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.default_local_dir": folder / CHECKPOINTS,
        "trainer.resume_mode": "auto",
        "trainer.val_before_train": True,
        "trainer.test_freq": recipe.evaluation.every // updates or batches,
        "hydra.run.dir": folder / "hydra",
        **({"trainer.validation_data_dir": folder / ANSWERS} if recipe.evaluation.needs_answers else {}),
    }


def _policy_loss(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Returns the settings of the region, by name if it is a preset, of the metrics and of the recording."""
    name = next((candidate for candidate in presets() if preset(candidate) == recipe.region), None)
    region = {} if name else {f"region.{key}": value for key, value in _flat(config_to_dict(recipe.region))}
    recording = recipe.recording(folder)
    records = {} if recording is None else config_to_dict(recording)
    more = region | {f"recording.{key}": value for key, value in records.items() if key != "kind"}
    if recipe.logging.metrics != "core":  # the adapter's default
        more["metrics"] = recipe.logging.metrics
    settings: dict[str, Any] = {f"{LOSS}.loss_mode": f"trustrl-{name}" if name else "trustrl"}
    if more:  # verl's configuration is typed, so new keys need a new type
        settings[f"{LOSS}._target_"] = "trustrl.engines.verl.RegionLossConfig"
    return settings | {f"+{LOSS}.{key}": value for key, value in more.items() if value is not None}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def hydra(value: Any) -> str:
    """Formats a value in hydra's grammar."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case list() | tuple():
            return f"[{','.join(map(hydra, value))}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{hydra(entry)}' for key, entry in value.items())}}}"
        case str() | Path() if not PLAIN.fullmatch(str(value)):
            return quoted(str(value))
        case _:
            return str(value)


def quoted(text: str) -> str:
    r"""Quotes a text in hydra's grammar.

    JSON will not do: hydra takes backslashes literally, except before a quote, and so `\u00fc` for six characters.

    Example:
        >>> print(quoted('/tmp/Jörg "x"'))
        "/tmp/Jörg \"x\""
    """
    return '"' + re.sub(r'(\\*)("|\Z)', lambda end: 2 * end[1] + ("\\" + end[2] if end[2] else ""), text) + '"'
