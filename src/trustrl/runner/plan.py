"""What a recipe amounts to, before anything is loaded: roles, counts, memory, cost, and the engine's own settings."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustrl.config.loading import config_to_dict
from trustrl.recording.schema import bytes_per_token
from trustrl.recording.settings import Recording
from trustrl.runner import trl_settings, verl_settings
from trustrl.runner.recipe import Recipe
from trustrl.runner.roles import Roles, roles
from trustrl.runner.shapes import shape_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
VERL_LOGITS = 4.4
"""verl's own pass over whole logits, in float32 arrays of tokens × vocabulary: 2,724 MB at 1,024 × 151,936 were
measured (docs/engines/verl.md)."""

DYNAMIC_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens in one of verl's micro-batches where no size was asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe, worked out."""

    recipe: Recipe
    roles: Roles
    counts: dict[str, int]
    memory: dict[str, int | None]
    records: dict[str, Any] | None
    """Where recorded tokens go, and the most that one takes in memory; None where nothing is recorded."""

    engine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "recipe": self.recipe.to_dict(),
            "roles": self.roles.to_dict(),
            "counts": self.counts,
            "memory_bytes_per_rank": self.memory,
            "records": self.records,
            "engine": self.engine,
        }


def plan(recipe: Recipe, folder: Path = Path("runs")) -> Plan:
    """Works a recipe out. Nothing is downloaded and no engine need be installed.

    Raises:
        ConfigError: the region needs what this engine and sampler do not record, or the engine would refuse a setting.
    """
    shape = shape_of(recipe.model)
    found = roles(recipe, shape.hidden_size)
    counts = _counts(recipe)
    return Plan(
        recipe,
        found,
        counts,
        _memory(recipe, found, counts),
        _records(recipe.recording(folder), recipe.region.needs().topk),
        engine_settings(recipe, folder),
    )


def _counts(recipe: Recipe) -> dict[str, int]:
    """Tokens are the most there can be: every completion at full length."""
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


def _memory(recipe: Recipe, found: Roles, counts: dict[str, int]) -> dict[str, int | None]:
    """Bytes on each rank. Activations and the sampler's cache of keys and values are not estimated."""
    shape, ranks = shape_of(recipe.model), recipe.engine.ranks
    width, on_trl = BYTES[recipe.model.dtype], recipe.engine.name == "trl"
    split = 1 if on_trl else ranks  # TRL's ranks hold everything unless accelerate's own configuration splits it
    total = shape.parameters
    sampler_copies = not on_trl or recipe.sampler.kind == "vllm"
    needs = recipe.region.needs()
    tokens = -(-counts["completion_tokens_per_batch"] // ranks)
    found_bytes: dict[str, int | None] = {
        "weights": _times(total, width / split),
        "gradients": _times(total, width / split),
        "adam": _times(total, 2 * width / split),
        "sampler_weights": _times(total, BYTES[recipe.sampler.dtype] / recipe.sampler.ranks) if sampler_copies else 0,
        "logits": 0 if on_trl or needs.topk or needs.full else _verl_logits(recipe, shape.vocab_size),
        "region_records": _times(found.record_bytes, tokens),
    }
    if needs.full:
        head = None if shape.hidden_size is None or shape.vocab_size is None else shape.hidden_size * shape.vocab_size
        found_bytes["copy_of_the_output_layer"] = _times(head, width)
    known = [value for value in found_bytes.values() if value is not None]
    return found_bytes | {"total": sum(known) if len(known) == len(found_bytes) else None}


def _records(recording: Recording | None, topk: int) -> dict[str, Any] | None:
    if recording is None:
        return None
    return {"folder": str(recording.folder), "bytes_per_token": bytes_per_token(topk if recording.topk else 0)}


def _times(count: int | None, factor: float) -> int | None:
    return None if count is None else round(count * factor)


def _verl_logits(recipe: Recipe, vocabulary: int | None) -> int | None:
    rows = recipe.engine.micro_batch
    length = recipe.schedule.max_prompt_tokens + recipe.schedule.max_completion_tokens
    share = recipe.schedule.sequences_per_step // recipe.engine.ranks * length
    tokens = rows * length if rows else min(share, DYNAMIC_TOKENS[recipe.engine.device])
    return _times(vocabulary, VERL_LOGITS * 4 * tokens)


def engine_settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The engine's own configuration, and how it is started.

    Raises:
        ConfigError: the engine would refuse it.
    """
    if recipe.engine.name == "verl":
        verl_settings.check(recipe, folder)
        return {"name": "verl", "command": verl_settings.command(recipe, folder, recipe.model.name)}
    trl_settings.check(recipe)
    recording = recipe.recording(folder)
    return {
        "name": "trl",
        "GRPOConfig": trl_settings.grpo_fields(recipe, str(folder / "checkpoints")),
        "TrustRegionGRPOTrainer": {
            **trl_settings.trainer_arguments(recipe),
            "region": config_to_dict(recipe.region),
            "recording": None if recording is None else config_to_dict(recording),
        },
        "launcher": launcher(recipe),
    }


def launcher(recipe: Recipe) -> str:
    """What starts the run's processes on TRL."""
    if recipe.engine.ranks == 1:
        return "trustrl run"
    nodes = f"--nnodes {recipe.engine.nodes} " if recipe.engine.nodes > 1 else ""
    return f"torchrun {nodes}--nproc_per_node {recipe.engine.ranks_per_node} -m trustrl.cli run"


def text(made: Plan) -> str:
    """The plan for people."""
    recipe, counts = made.recipe, made.counts
    lines = [
        f"{recipe.name}: {recipe.model.name} learns {recipe.task.name}, {recipe.region.kind} on {recipe.engine.name} "
        f"({recipe.engine.ranks} × {recipe.engine.device})",
        "",
        "Roles",
        f"  behavior      {made.roles.behavior}",
        f"  proximal      {made.roles.proximal}",
        f"  anchor        {made.roles.anchor}",
        f"  distribution  {made.roles.distribution}",
        "",
        "Counts (tokens: the most there can be)",
        f"  a step        {counts['sequences_per_step']:,} sequences, {counts['completion_tokens_per_step']:,} "
        "completion tokens, 1 update",
        f"  a batch       {counts['sequences_per_batch']:,} sequences, {counts['completion_tokens_per_batch']:,} "
        f"completion tokens, {counts['updates_per_batch']} update{'s' * (counts['updates_per_batch'] > 1)}",
        f"  in all        {counts['steps']:,} updates, {counts['batches']:,} batches, "
        f"{counts['sequences_sampled']:,} sequences, {counts['completion_tokens_sampled']:,} completion tokens",
        "",
        "Memory on each rank, estimated (without activations and the sampler's cache)",
        *(f"  {name.replace('_', ' '):<26}{_size(value):>12}" for name, value in made.memory.items()),
        f"  the region records {made.roles.bytes_per_token} bytes for each completion token",
        "",
        "Forward passes beside the engine's own, for each batch",
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
        f"  in            {made.records['folder']}",
        f"  on disk       {100 * recording.sample:g} % of the sequences of every step, at most "
        f"{recording.max_rows_per_step:,} tokens of it on each rank",
        f"  in memory     the last {recording.ring_steps} steps on each rank, at most {_size(recording.ring_bytes)}; "
        f"up to {made.records['bytes_per_token']} bytes a token",
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
