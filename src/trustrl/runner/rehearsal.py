"""Rehearsal of a recipe: the same keys, engine and code on this machine's CPU, at a small size."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import LARGEST_HEADER, parsed_json, read_regular
from trustrl.runner.algorithm_tables import MODEL
from trustrl.runner.evaluation_tables import EvaluationSet
from trustrl.runner.layout import SIZES, Layout
from trustrl.runner.recipe import OWN_DATA, Recipe
from trustrl.runner.recipe_files import without_none
from trustrl.runner.recipe_tables import Model, Schedule
from trustrl.world.models import ARCHITECTURES, MODELS
from trustrl.world.tasks.own_data import DataSet

VLLM_PYTHON = "TRUSTRL_VLLM_PYTHON"
MOST_RANKS = 4
CPU_TOKENS = 4096
"""Tokens of a micro-batch on a CPU, unless one sequence has more."""

PROMPT, COMPLETION = 256, 16
"""Bytes of a stand-in's prompts and completions, which are its tokens."""

HALF = "a CPU emulates half precision"
PLAN = "a plan's estimate of the large model"
SIZE = "2 shows that the work is split"
SHORT = "two batches show that the weights move on"
FEW = "the fewest that every process and update needs"
REASONS = {
    "name": "not the run itself",
    "model.name": "a network of the same architecture with 2 layers and random weights, trained for seconds",
    "model.architecture": "part of the stand-in's name",
    "model.dtype": HALF, "sampler.dtype": HALF,
    "model.parameters": PLAN, "model.expert_parameters": PLAN, "model.hidden_size": PLAN, "model.vocab_size": PLAN,
    "task.problems": FEW,
    "engine.device": "no GPU is used",
    "engine.nodes": "one machine",
    "engine.ranks_per_node": "processes stand for GPUs: two, four if [layout] needs them, one on TRL",
    "engine.micro_batch": FEW, "engine.micro_batch_tokens": "room for one sequence",
    **{f"layout.{name}": SIZE for name in SIZES},
    "layout.ulysses_parallel": "needs the kernels of flash-attention",
    "layout.router_replay": "transformers, which samples here, returns no experts",
    "sampler.kind": f"vLLM is not installed, or not named by {VLLM_PYTHON} for verl",
    "sampler.ranks": "one server samples for all processes on a CPU, without vLLM's tensor and expert parallelism",
    "sampler.memory_share": "no GPU is used",
    "optimiser.warmup_steps": SHORT,
    "schedule.steps": SHORT, "schedule.updates_per_batch": "2 show that the second update begins away from the sampler",
    "schedule.prompts_per_step": FEW, "schedule.completions_per_prompt": FEW,
    "schedule.max_prompt_tokens": "a token is one byte here",
    "schedule.max_completion_tokens": r"room for \boxed{1}",
    "schedule.mean_completion_tokens": PLAN,
    "schedule.checkpoint_every": "one checkpoint, at the end",
    "evaluation.count": FEW, "evaluation.every": "after every batch", "evaluation.answers": FEW, "evaluation.sets": FEW,
    "evaluation.pass_at": FEW, "evaluation.top_p": "transformers, which samples here, does not truncate",
    "logging.tracker": "not worth a dashboard",
    "records.sample": "all of the few sequences",
}  # fmt: skip
"""Reason for the change of each key. A rehearsal changes no others, [data] apart."""


def rehearsed(recipe: Recipe, *, vllm: bool) -> tuple[Recipe, list[str]]:
    """Returns the recipe at the size of a rehearsal, and one sentence for each change.

    Args:
        recipe: The recipe as it would be run.
        vllm: Whether vLLM is installed, so that a recipe which samples with it can do so here.

    Raises:
        ConfigError: If the model is not here and the recipe does not state its architecture.
    """
    layout, ranks = _layout(recipe, vllm)
    schedule = _schedule(recipe, layout.replicas(ranks))
    updates, evaluation = schedule.updates_per_batch, recipe.evaluation
    task, said, held_out = recipe.task, [], 1
    if task.name == OWN_DATA:
        sets = [_stand_in(DataSet(**table)) for table in task.settings["data"]]
        said = [sentence for _, sentence in sets if sentence]
        held_out = sum(chosen.use != "train" for chosen, _ in sets)
        task = replace(task, settings={**task.settings, "data": [without_none(asdict(chosen)) for chosen, _ in sets]})
    longest = schedule.max_prompt_tokens + schedule.max_completion_tokens
    truncates = vllm or recipe.engine.name == "trl"
    kind = recipe.sampler.kind if vllm else "transformers"
    if recipe.lora is not None and recipe.engine.name == "verl":
        said.append(f"{MODEL}.lora.merge is True instead of False: samplers on a CPU take whole models.")
    small = replace(
        recipe,
        name=f"{recipe.name}-rehearsal",
        model=Model(name=_model(recipe.model)),
        task=replace(task, problems=None if task.problems is None else min(task.problems, 64)),
        engine=replace(
            recipe.engine, device="cpu", nodes=1, ranks_per_node=ranks, micro_batch=recipe.engine.micro_batch and 1,
            micro_batch_tokens=longest if recipe.engine.name == "verl" and longest > CPU_TOKENS else None,
        ),
        layout=layout,
        sampler=replace(recipe.sampler, kind=kind, dtype="float32", ranks=1, memory_share=None),
        optimiser=replace(recipe.optimiser, warmup_steps=min(recipe.optimiser.warmup_steps, updates)),
        schedule=schedule,
        evaluation=replace(
            evaluation, every=evaluation.every and updates, answers=min(evaluation.answers, 2),
            count=min(evaluation.count, 4 * max(1, held_out)), pass_at=_smaller(evaluation.pass_at),
            top_p=evaluation.top_p if truncates else 1.0, sets=[_set(block, truncates) for block in evaluation.sets],
        ),
        logging=replace(recipe.logging, tracker=None),
        records=None if recipe.records is None else replace(recipe.records, sample=1.0),
    )  # fmt: skip
    before, after = (dict(_flat(chosen.to_dict())) for chosen in (recipe, small))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return small, said + [
        f"{key} is {_word(after.get(key))} instead of {_word(before.get(key))}: {REASONS[key]}."
        for key in changed
    ]  # fmt: skip


def vllm_is_here(engine: str) -> bool:
    """Returns whether vLLM is installed: in this environment, or for verl in the one that its CPU package starts."""
    return bool(os.environ.get(VLLM_PYTHON)) if engine == "verl" else find_spec("vllm") is not None


def _set(block: EvaluationSet, truncates: bool) -> EvaluationSet:
    return replace(
        block, count=4, answers=block.answers and min(block.answers, 2), top_p=block.top_p if truncates else None,
        pass_at=None if block.pass_at is None else _smaller(block.pass_at),
    )  # fmt: skip


def _smaller(ks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({min(k, 2) for k in ks}))


def _layout(recipe: Recipe, vllm: bool) -> tuple[Layout, int]:
    """Returns the layout with every size above 1 as 2, as far as 4 processes suffice, and the number of processes."""
    own = recipe.layout
    if recipe.engine.name == "trl":
        return own, 1
    sizes = {name: size and min(size, 2) for name in SIZES if (size := getattr(own, name)) != 1}
    replay = own.router_replay if vllm else "disabled"
    for left_out in ((), ("pipeline_parallel",), ("pipeline_parallel", "context_parallel")):
        smaller = {**sizes, **dict.fromkeys(left_out, 1), "ulysses_parallel": 1}
        layout = replace(own, **smaller, router_replay=replay)
        model = layout.tensor_parallel * layout.pipeline_parallel * layout.sequence_ranks
        ranks = math.lcm(model, layout.pipeline_parallel * layout.expert_ranks)
        if ranks <= MOST_RANKS:
            break
    return layout, max(ranks, min(recipe.engine.ranks, 2))


def _schedule(recipe: Recipe, replicas: int) -> Schedule:
    """Returns two batches of at most two updates, with completions as short as those of the stand-in."""
    own = recipe.schedule
    updates = min(own.updates_per_batch, 2)
    sets = recipe.task.settings.get("data", ())
    if recipe.model.name in MODELS:
        prompt = own.max_prompt_tokens
    else:
        prompt = PROMPT if sets and all(table.get("hub") for table in sets) else 4 * own.max_prompt_tokens
    return replace(
        own,
        steps=2 * updates,
        updates_per_batch=updates,
        prompts_per_step=max(2, replicas),
        completions_per_prompt=min(own.completions_per_prompt, 4),
        max_prompt_tokens=prompt,
        max_completion_tokens=min(own.max_completion_tokens, COMPLETION),
        mean_completion_tokens=None,
        checkpoint_every=2 * updates,
    )


def _model(model: Model) -> str:
    """Returns the name of the stand-in, or the model's if it is tiny itself."""
    if model.name in MODELS:
        return model.name
    architecture, config = model.architecture, Path(model.name) / "config.json"
    if architecture is None and config.is_file():
        architecture = parsed_json(read_regular(config, LARGEST_HEADER)).get("model_type")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model.architecture must be one of {', '.join(ARCHITECTURES)} to rehearse {model.name}, got "
            f"{architecture!r}."
        )
    return f"stand-in-{architecture}"


def _stand_in(chosen: DataSet) -> tuple[DataSet, str]:
    """Returns a set from the hub with files of the same columns, and a sentence about them."""
    if chosen.hub is None:
        return chosen, ""
    from trustrl.world.models.stand_in import problems_file

    values = {
        **dict.fromkeys(chosen.columns, ""),
        **{name: value[0] if isinstance(value, (list, tuple)) else value for name, value in chosen.where.items()},
    }
    few, many = (str(problems_file(values, chosen.prompt, chosen.answer, few=few)) for few in (True, False))
    held_out = (few,) if chosen.held_out_split else ()
    small = replace(
        chosen, hub=None, subset=None, held_out_split=None, name=chosen.label,
        files=(few,) if chosen.use == "held_out" else (many,), held_out_files=held_out,
    )  # fmt: skip
    return small, f"NOT THE DATA of {chosen.hub}: subtractions of this machine, in the same columns, stand in for them."


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif key not in ("data", "reward"):
            yield f"{prefix}{key}", value


def _word(value: Any) -> Any:
    return "left out" if value is None else value
