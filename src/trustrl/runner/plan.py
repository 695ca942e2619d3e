"""Plan of a recipe before anything is loaded: roles, counts, memory, cost, and the engine's own settings."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustrl.config.loading import config_to_dict
from trustrl.recording.recording_settings import Recording
from trustrl.recording.schema import bytes_per_token
from trustrl.runner import trl_arguments, verl_command
from trustrl.runner.plan_memory import memory, shape_of
from trustrl.runner.policy_roles import Roles, roles
from trustrl.runner.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved recipe: its roles, counts, memory estimate and engine settings."""

    recipe: Recipe
    roles: Roles
    counts: dict[str, int]
    memory: dict[str, int | None]
    records: dict[str, Any] | None
    """Directory of the token records, and the largest size of a token in memory. None if nothing is recorded."""

    engine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return {
            "recipe": self.recipe.to_dict(),
            "roles": self.roles.to_dict(),
            "counts": self.counts,
            "memory_bytes_per_rank": self.memory,
            "records": self.records,
            "engine": self.engine,
        }


def plan(recipe: Recipe, folder: Path = Path("runs")) -> Plan:
    """Resolves a recipe. Downloads nothing and needs no engine.

    Raises:
        ConfigError: If the region needs values that this engine and sampler do not record, or if the engine would
            refuse a setting.
    """
    shape = shape_of(recipe.model)
    found = roles(recipe, shape.hidden_size)
    counts = _counts(recipe)
    return Plan(
        recipe,
        found,
        counts,
        memory(recipe, shape, found, counts),
        _records(recipe.recording(folder), recipe.region.needs().topk),
        engine_settings(recipe, folder),
    )


def _counts(recipe: Recipe) -> dict[str, int]:
    """Counts steps, sequences and tokens. Token counts are upper bounds: every completion at full length."""
    schedule = recipe.schedule
    batches = schedule.steps // schedule.updates_per_batch
    per_batch = schedule.prompts_per_batch * schedule.completions_per_prompt
    return {
        "steps": schedule.steps,
        "batches": batches,
        "updates_per_batch": schedule.updates_per_batch,
        "sequences_per_step": schedule.sequences_per_step,
        "sequences_per_batch": per_batch,
        "sequences_sampled": per_batch * batches,
        "completion_tokens_per_step": schedule.sequences_per_step * schedule.max_completion_tokens,
        "completion_tokens_per_batch": per_batch * schedule.max_completion_tokens,
        "completion_tokens_sampled": per_batch * batches * schedule.max_completion_tokens,
        "ranks": recipe.engine.ranks,
        "checkpoint_every": schedule.save_every,
    }


def _records(recording: Recording | None, topk: int) -> dict[str, Any] | None:
    if recording is None:
        return None
    return {"folder": str(recording.folder), "bytes_per_token": bytes_per_token(topk if recording.topk else 0)}


def engine_settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Returns the engine's own configuration and the way to start it.

    Raises:
        ConfigError: If the engine would refuse it.
    """
    if recipe.engine.name == "verl":
        verl_command.check(recipe, folder)
        return {"name": "verl", "command": verl_command.command(recipe, folder, recipe.model.name)}
    trl_arguments.check(recipe)
    recording = recipe.recording(folder)
    return {
        "name": "trl",
        "GRPOConfig": trl_arguments.grpo_fields(recipe, str(folder / "checkpoints")),
        "TrustRegionGRPOTrainer": {
            **trl_arguments.trainer_arguments(recipe),
            "region": config_to_dict(recipe.region),
            "recording": None if recording is None else config_to_dict(recording),
        },
        "launcher": launcher(recipe),
    }


def launcher(recipe: Recipe) -> str:
    """Returns the command that starts the run's processes on TRL."""
    if recipe.engine.ranks == 1:
        return "trustrl run"
    nodes = f"--nnodes {recipe.engine.nodes} " if recipe.engine.nodes > 1 else ""
    return f"torchrun {nodes}--nproc_per_node {recipe.engine.ranks_per_node} -m trustrl.cli run"


def text(made: Plan) -> str:
    """Formats the plan for the terminal."""
    recipe, counts = made.recipe, made.counts
    lines = [
        f"{recipe.name}: train {recipe.model.name} on {recipe.task.name} with {recipe.region.kind}, on "
        f"{recipe.engine.name} ({recipe.engine.ranks} × {recipe.engine.device})",
        "",
        "Roles",
        f"  behavior      {made.roles.behavior}",
        f"  proximal      {made.roles.proximal}",
        f"  anchor        {made.roles.anchor}",
        f"  distribution  {made.roles.distribution}",
        "",
        "Counts (tokens: upper bounds)",
        f"  a step        {counts['sequences_per_step']:,} sequences, {counts['completion_tokens_per_step']:,} "
        "completion tokens, 1 update",
        f"  a batch       {counts['sequences_per_batch']:,} sequences, {counts['completion_tokens_per_batch']:,} "
        f"completion tokens, {counts['updates_per_batch']} update{'s' * (counts['updates_per_batch'] > 1)}",
        f"  total         {counts['steps']:,} updates, {counts['batches']:,} batches, "
        f"{counts['sequences_sampled']:,} sequences, {counts['completion_tokens_sampled']:,} completion tokens",
        "",
        "Estimated memory on each rank (without activations and the sampler's cache)",
        *(f"  {name.replace('_', ' '):<26}{_size(value):>12}" for name, value in made.memory.items()),
        f"  the region records {made.roles.bytes_per_token} bytes for each completion token",
        "",
        "Additional forward passes for each batch",
        *(f"  {one}" for one in made.roles.passes or ("none",)),
        "",
        *_records_text(made),
        *_engine_text(made.engine),
    ]
    return "\n".join(lines)


def _records_text(made: Plan) -> list[str]:
    recording = made.recipe.records
    if recording is None or made.records is None:
        return []
    return [
        "Records",
        f"  directory     {made.records['folder']}",
        f"  on disk       {100 * recording.sample:g}% of the sequences of every step, at most "
        f"{recording.max_rows_per_step:,} tokens per step on each rank",
        f"  in memory     the last {recording.ring_steps} steps on each rank, at most {_size(recording.ring_bytes)}; "
        f"up to {made.records['bytes_per_token']} bytes per token"
        + (", and 2 for each layer and chosen expert" if recording.experts else ""),
        "",
    ]


def _engine_text(engine: dict[str, Any]) -> list[str]:
    if engine["name"] == "verl":
        python, dash_m, module, *settings = engine["command"]
        head = f"  {Path(python).name} {dash_m} {module}"
        return ["Command", " \\\n      ".join([head, *map(shlex.quote, settings)])]
    return [
        f"GRPOConfig (started by `{engine['launcher']}`)",
        *(f"  {key} = {value!r}" for key, value in engine["GRPOConfig"].items()),
        "TrustRegionGRPOTrainer",
        *(f"  {key} = {value!r}" for key, value in engine["TrustRegionGRPOTrainer"].items()),
    ]


def _size(value: int | None) -> str:
    if value is None:
        return "unknown"
    size, units = float(value), ["B", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.{0 if units[0] == 'B' else 1}f} {units[0]}"
