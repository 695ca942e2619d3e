"""Plan of a recipe before anything is loaded: roles, counts, memory, cost, and the engine's own settings."""

import shlex
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trustrl.errors import MissingPackageError, TrustRLWarning
from trustrl.recording.recording_settings import Recording
from trustrl.recording.schema import bytes_per_token
from trustrl.regions.dppo import DPPO
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset
from trustrl.regions.recommended import recommended
from trustrl.runner import trl_arguments, verl_command
from trustrl.runner.layout import Layout
from trustrl.runner.model_shape import shape_of
from trustrl.runner.plan_estimates import Cost, memory
from trustrl.runner.policy_roles import Roles, roles
from trustrl.runner.processes import is_main_process
from trustrl.runner.recipe import Recipe
from trustrl.runner.region_costs import RegionCost, region_costs
from trustrl.world import tasks

SMALLEST_RATES = {"bfloat16": 1e-4, "float16": 1e-5}
"""Learning rates from which most weights of usual size (0.02) follow AdamW's updates in a dtype, measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved recipe: its roles, counts, memory estimate and engine settings."""

    recipe: Recipe
    roles: Roles
    counts: dict[str, int]
    cost: Cost
    memory: dict[str, int | None]
    records: dict[str, Any] | None
    """Directory of the token records, and the largest size of a token in memory. None if nothing is recorded."""

    layout: Layout | None
    """verl's layout, with `engine.settings` applied. None on TRL."""

    region_costs: list[RegionCost]
    """Costs of the region on verl next to those of other regions. Empty on TRL."""

    engine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return {
            "recipe": self.recipe.to_dict(),
            "roles": self.roles.to_dict(),
            "counts": self.counts,
            "cost": self.cost.to_dict(),
            "memory_bytes_per_rank": self.memory,
            "records": self.records,
            "layout": None if self.layout is None else asdict(self.layout),
            "region_costs": [cost.to_dict() for cost in self.region_costs],
            "engine": self.engine,
        }


def plan(
    recipe: Recipe, folder: Path = Path("runs"), *, tokens_per_second: float | None = None, price: float | None = None
) -> Plan:
    """Resolves a recipe. Downloads nothing and needs no engine.

    Args:
        recipe: The recipe.
        folder: The run directory.
        tokens_per_second: Completion tokens that one GPU samples and trains in a second, for the cost.
        price: Price of a GPU hour.

    Raises:
        ConfigError: If the region needs values that this engine and sampler do not record, if the engine would refuse
            a setting, or if files, columns or functions of the data and the reward are missing.
        RecordError: If the first row of a file cannot be read.
        UnknownNameError: If no task has the recipe's name.
    """
    with suppress(MissingPackageError):  # a plan may be made where the task's packages are not installed
        tasks.load(recipe.task.name, **recipe.task.settings).check()
    shape = shape_of(recipe.model)
    recipe_roles = roles(recipe, shape.hidden_size)
    engine = engine_settings(recipe, folder)
    on_verl = recipe.engine.name == "verl"
    layout = verl_command.layout_of(recipe) if on_verl else Layout()
    counts = _counts(recipe, layout)
    _warn_of_rounding(recipe, layout)
    return Plan(
        recipe,
        recipe_roles,
        counts,
        Cost(counts["completion_tokens_sampled"], recipe.engine.ranks, tokens_per_second, price),
        memory(recipe, shape, layout),
        _records(recipe.recording(folder), recipe.region.needs().topk),
        layout if on_verl else None,
        region_costs(recipe, layout, shape) if on_verl else [],
        engine,
    )


def _warn_of_rounding(recipe: Recipe, layout: Layout) -> None:
    """Warns if the trained weights are so coarse that most updates do not change them.

    AdamW moves a weight by about the learning rate. In bf16, neighbors of a weight of 0.02 are 1e-4 apart. Megatron's
    optimizer and LoRA keep float32 weights.
    """
    dtype, rate = recipe.model.dtype, recipe.optimiser.learning_rate
    keeps_float32 = layout.megatron or recipe.lora is not None
    if rate >= SMALLEST_RATES.get(dtype, 0.0) or keeps_float32 or not is_main_process():  # every rank plans its run
        return
    on_gpus = recipe.engine.name == "verl" and recipe.engine.device != "cpu"
    still = " verl computes in bf16 all the same." if on_gpus else ""
    warnings.warn(
        f"Weights in {dtype} hardly move at optimiser.learning_rate = {rate:g}: most updates are smaller than the gap "
        f"between two numbers, and are rounded away. Set model.dtype = 'float32'.{still}",
        TrustRLWarning,
        stacklevel=3,
    )


def _counts(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """Counts steps, sequences and tokens. Token counts are upper bounds, unless the recipe has a mean length."""
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
        "completion_tokens_per_step": schedule.completion_tokens(schedule.sequences_per_step),
        "completion_tokens_per_batch": schedule.completion_tokens(per_batch),
        "completion_tokens_sampled": schedule.completion_tokens(per_batch) * batches,
        "ranks": recipe.engine.ranks,
        "replicas": layout.replicas(recipe.engine.ranks),
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
            **({} if (lora := trl_arguments.lora_fields(recipe)) is None else {"peft_config": lora}),
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
    mean, longest = recipe.schedule.mean_completion_tokens, recipe.schedule.max_completion_tokens
    lengths = "upper bounds" if mean is None else f"completions of {mean:,} on average and at most {longest:,}"
    of_last_stage = " of the last stage" if made.layout is not None and made.layout.pipeline_parallel > 1 else ""
    lines = [
        f"{recipe.name}: train {recipe.model.name} on {_trained_on(recipe)} with {recipe.region.kind}, on "
        f"{recipe.engine.name} ({recipe.engine.ranks} × {recipe.engine.device})",
        "",
        *_advice(recipe),
        "Roles",
        f"  behavior      {made.roles.behavior}",
        f"  proximal      {made.roles.proximal}",
        f"  anchor        {made.roles.anchor}",
        f"  distribution  {made.roles.distribution}",
        "",
        f"Counts (tokens: {lengths})",
        f"  a step        {counts['sequences_per_step']:,} sequences, {counts['completion_tokens_per_step']:,} "
        "completion tokens, 1 update",
        f"  a batch       {counts['sequences_per_batch']:,} sequences, {counts['completion_tokens_per_batch']:,} "
        f"completion tokens, {counts['updates_per_batch']} update{'s' * (counts['updates_per_batch'] > 1)}",
        f"  total         {counts['steps']:,} updates, {counts['batches']:,} batches, "
        f"{counts['sequences_sampled']:,} sequences, {counts['completion_tokens_sampled']:,} completion tokens",
        "",
        *made.cost.text(),
        *_layout_text(made),
        f"Estimated memory on each rank{of_last_stage} (without activations and the sampler's cache)",
        *(f"  {name.replace('_', ' '):<26}{_size(value):>12}" for name, value in made.memory.items()),
        f"  the region records {made.roles.bytes_per_token} bytes for each completion token",
        "",
        "Additional forward passes for each batch",
        *(f"  {forward_pass}" for forward_pass in made.roles.passes or ("none",)),
        "",
        *_costs_text(made.region_costs),
        *_records_text(made),
        *_engine_text(made.engine),
    ]
    return "\n".join(lines)


def _advice(recipe: Recipe) -> list[str]:
    """Returns the recommended region and its values, if the recipe has another."""
    name = recommended(recipe.region.needs())
    region = preset(name)
    if recipe.region == region or not isinstance(region, DPPO):
        return []
    bound, cap = region.divergence.max_increase, region.max_ratio
    return [
        f"Recommended unless a paper is reproduced: {name}, a bound of {bound:g} and weights of at most {cap:g}",
        "",
    ]


def _trained_on(recipe: Recipe) -> str:
    """Returns the task, or the files of verl's own settings that replace it."""
    files = verl_command.engine_settings(recipe).get("data.train_files") if recipe.engine.name == "verl" else None
    return recipe.task.label if files is None else ", ".join(map(str, files if isinstance(files, list) else [files]))


def _layout_text(made: Plan) -> list[str]:
    if made.layout is None or not made.layout.chosen():
        return []
    chosen = made.layout.chosen() | {"replicas": made.counts["replicas"]}
    return ["Layout", *(f"  {name.replace('_', ' '):<24}{value}" for name, value in chosen.items()), ""]


def _costs_text(costs: list[RegionCost]) -> list[str]:
    if not costs:
        return []
    rows = [
        (
            cost.region + " (this recipe)" * cost.chosen,
            _size(cost.record_bytes_per_token),
            _size(cost.record_bytes),
            _size(cost.vocabulary_pass_bytes) if cost.vocabulary_pass_bytes != 0 else "verl's",
            _size(cost.loss_bytes),
            _size(cost.output_layer_copy_bytes),
            _size(cost.anchor_sends_per_token),
            _size(cost.update_sends_per_token),
            _size(cost.sends_per_step),
        )
        for cost in costs
    ]
    titles = ("region", "record", "records", "pass", "loss", "copy", "anchor", "update", "step")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "Estimated costs of regions on a rank with the output layer",
        *("  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (titles, *rows)),
        "  Memory: record for each completion token, records for a batch, pass over the vocabulary and loss of a",
        "  micro-batch, copy of the output layer. Sent to tensor-parallel ranks: anchor and update for each completion",
        "  token, step in total.",
        "",
    ]


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
