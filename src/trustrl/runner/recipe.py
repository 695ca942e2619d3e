"""A recipe: everything that one training run follows from, on any engine. See docs/reference/recipe.md."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trustrl.config import checks
from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict, config_to_dict
from trustrl.config.presets import preset
from trustrl.errors import ConfigError
from trustrl.registry import nearest
from trustrl.runner import toml

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """[model]: what is trained."""

    name: str
    """A name that `trustrl.models.path` knows, a folder, or a hub id."""

    dtype: str = "float32"
    """Of the trained weights."""

    parameters: int | None = None
    """For the plan's memory alone, where the model is not on this machine."""

    hidden_size: int | None = None
    """For the plan alone."""

    vocab_size: int | None = None
    """For the plan alone."""

    def __post_init__(self) -> None:
        _text("model.name", self.name)
        checks.one_of("model.dtype", self.dtype, DTYPES)
        for name in ("parameters", "hidden_size", "vocab_size"):
            if getattr(self, name) is not None:
                checks.whole(f"model.{name}", getattr(self, name), low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskChoice:
    """[task]: problems and their reward."""

    name: str
    """A name that `trustrl.tasks.load` knows, such as "arithmetic" or "reasoning-gym:chain_sum"."""

    chat: bool = False
    """Whether prompts are worded for a chat model."""

    problems: int = 2000
    """Training problems that prompts are drawn from."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the task."""

    def __post_init__(self) -> None:
        _text("task.name", self.name)
        _truth("task.chat", self.chat)
        checks.whole("task.problems", self.problems, low=1)
        _mapping("task.settings", self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """[engine]: who trains, and on what."""

    name: Literal["trl", "verl"]
    """The trainer."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where."""

    nodes: int = 1
    """Machines."""

    ranks_per_node: int = 1
    """Training processes on each of them: GPUs, on GPUs."""

    micro_batch: int | None = None
    """Sequences in one forward pass of a rank; a step's share of the rank unless told."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine's own: fields of GRPOConfig, or verl's settings as dotted keys or tables. They win."""

    def __post_init__(self) -> None:
        checks.one_of("engine.name", self.name, ("trl", "verl"))
        checks.one_of("engine.device", self.device, ("cpu", "cuda"))
        checks.whole("engine.nodes", self.nodes, low=1)
        checks.whole("engine.ranks_per_node", self.ranks_per_node, low=1)
        if self.micro_batch is not None:
            checks.whole("engine.micro_batch", self.micro_batch, low=1)
        _mapping("engine.settings", self.settings)

    @property
    def ranks(self) -> int:
        """Training processes in all."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """[sampler]: who draws the completions, which makes it the behavior policy."""

    kind: Literal["transformers", "vllm"] = "transformers"
    """transformers samples with the trainer's own network, vLLM with an engine of its own."""

    dtype: str = "float32"
    """Of the sampler; another one than the trainer's is a real mismatch. With transformers on TRL, the model's own."""

    temperature: float = 1.0
    """Of the completions to train on."""

    ranks: int = 1
    """GPUs that share one copy of vLLM's weights (tensor parallel)."""

    def __post_init__(self) -> None:
        checks.one_of("sampler.kind", self.kind, ("transformers", "vllm"))
        checks.one_of("sampler.dtype", self.dtype, DTYPES)
        checks.real("sampler.temperature", self.temperature, rule="a temperature > 0", low=0.0)
        checks.whole("sampler.ranks", self.ranks, low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimiser:
    """[optimiser]: AdamW's settings."""

    learning_rate: float
    """The highest of the schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes on after the warm-up. verl has no linear one."""

    warmup_steps: int = 0
    """Steps it rises for. On verl a multiple of `schedule.updates_per_batch`."""

    weight_decay: float = 0.0
    """Of all weights but biases and norms, as the engine sees them."""

    max_grad_norm: float = 1.0
    """Longer gradients are shortened to this."""

    def __post_init__(self) -> None:
        checks.real("optimiser.learning_rate", self.learning_rate, rule="a number > 0", low=0.0)
        checks.one_of("optimiser.schedule", self.schedule, ("constant", "linear", "cosine"))
        checks.whole("optimiser.warmup_steps", self.warmup_steps, low=0)
        checks.non_negative("optimiser.weight_decay", self.weight_decay)
        checks.real("optimiser.max_grad_norm", self.max_grad_norm, rule="a length > 0", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """[schedule]: how much is sampled, and how often it is trained on. A step is one update of the weights."""

    steps: int
    """Updates of the weights in all."""

    prompts_per_step: int
    """Problems one update sees."""

    completions_per_prompt: int
    """The group whose rewards are compared."""

    max_prompt_tokens: int
    """Room for a prompt."""

    max_completion_tokens: int
    """Where a completion is cut."""

    updates_per_batch: int = 1
    """Updates from one batch of rollouts: the staleness a region is for."""

    update_sees: Literal["batch", "part"] = "batch"
    """Whether each of these updates sees the whole batch again, or a part of its own. In parts a batch is
    `updates_per_batch` times as large."""

    checkpoint_every: int | None = None
    """Steps between checkpoints, a multiple of `updates_per_batch`: a tenth of the run unless told."""

    seed: int = 0
    """Of problems, samples and shuffles."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "prompts_per_step", "max_prompt_tokens", "max_completion_tokens", "updates_per_batch",
        ):  # fmt: skip
            checks.whole(f"schedule.{name}", getattr(self, name), low=1)
        checks.whole(
            "schedule.completions_per_prompt",
            self.completions_per_prompt,
            low=2,
            advice="Advantages compare the completions of one prompt.",
        )
        checks.whole("schedule.seed", self.seed, low=0)
        checks.one_of("schedule.update_sees", self.update_sees, ("batch", "part"))
        if self.steps % self.updates_per_batch:
            raise ConfigError(
                f"schedule.steps must be a multiple of updates_per_batch, {self.updates_per_batch}, got {self.steps}. "
                "The last batch would be left half used."
            )
        if self.checkpoint_every is not None:
            checks.whole("schedule.checkpoint_every", self.checkpoint_every, low=1)
            if self.checkpoint_every % self.updates_per_batch:
                raise ConfigError(
                    f"schedule.checkpoint_every must be a multiple of updates_per_batch, {self.updates_per_batch}, got "
                    f"{self.checkpoint_every}. Engines keep no rollouts: a run goes on unchanged only between batches."
                )

    @property
    def sequences_per_step(self) -> int:
        """Completions one update sees."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def prompts_per_batch(self) -> int:
        """Problems sampled at once."""
        return self.prompts_per_step * (self.updates_per_batch if self.update_sees == "part" else 1)

    @property
    def save_every(self) -> int:
        """`checkpoint_every`, or its default."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        batches = -(-self.steps // (10 * self.updates_per_batch))
        return batches * self.updates_per_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """[evaluation]: held-out problems, before training, after it, and in between if wanted."""

    count: int = 500
    """Answers to score; where there are fewer held-out problems, some are answered more than once."""

    every: int = 0
    """Steps between evaluations; 0 for before and after alone. On verl a multiple of `schedule.updates_per_batch`."""

    temperature: float = 1.0
    """0 takes the most likely token."""

    def __post_init__(self) -> None:
        checks.whole("evaluation.count", self.count, low=1)
        checks.whole("evaluation.every", self.every, low=0)
        checks.non_negative("evaluation.temperature", self.temperature)


TABLES: dict[str, type] = {
    "model": Model, "task": TaskChoice, "engine": Engine, "sampler": Sampler, "optimiser": Optimiser,
    "schedule": Schedule, "evaluation": Evaluation,
}  # fmt: skip
"""Every table but [region], which has the settings of regions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that one run follows from."""

    name: str
    """What the run is called."""

    model: Model
    task: TaskChoice
    engine: Engine
    region: Region
    """`preset = "<name>"` with what differs from it, or a `kind` and its settings in full."""

    optimiser: Optimiser
    schedule: Schedule
    sampler: Sampler = field(default_factory=Sampler)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        _text("name", self.name)
        checks.instance("region", self.region, (Region,))
        ranks, sequences = self.engine.ranks, self.schedule.sequences_per_step
        if sequences % ranks:
            raise ConfigError(
                f"schedule.prompts_per_step × completions_per_prompt must be a multiple of the {ranks} ranks, got "
                f"{sequences}."
            )
        if self.engine.micro_batch is not None and (sequences // ranks) % self.engine.micro_batch:
            raise ConfigError(
                f"engine.micro_batch must divide a rank's share of a step, {sequences // ranks} sequences, got "
                f"{self.engine.micro_batch}."
            )
        if self.engine.ranks_per_node % self.sampler.ranks:
            raise ConfigError(
                f"sampler.ranks must divide engine.ranks_per_node, {self.engine.ranks_per_node}, got "
                f"{self.sampler.ranks}."
            )
        if self.task.problems < self.schedule.prompts_per_batch:
            raise ConfigError(
                f"task.problems must be at least the {self.schedule.prompts_per_batch} prompts of a batch, got "
                f"{self.task.problems}."
            )
        if self.engine.name == "verl":
            self._check_verl()

    def _check_verl(self) -> None:
        updates = self.schedule.updates_per_batch
        for where, value in (
            ("optimiser.warmup_steps", self.optimiser.warmup_steps), ("evaluation.every", self.evaluation.every),
        ):  # fmt: skip
            if value % updates:
                raise ConfigError(
                    f"{where} must be a multiple of schedule.updates_per_batch, {updates}, on verl, got {value}. "
                    "verl counts batches."
                )
        if self.optimiser.schedule == "linear":
            raise ConfigError("optimiser.schedule must be 'constant' or 'cosine' on verl, got 'linear'.")
        if self.sampler.kind == "transformers" and self.engine.device != "cpu":
            raise ConfigError(
                "sampler.kind must be 'vllm' for verl on GPUs, got 'transformers', which is its sampler on a CPU."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal recipe; the region in full."""
        tables = {name: _plain(getattr(self, name)) for name in TABLES}
        return {"name": self.name, **tables, "region": _without_none(config_to_dict(self.region))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """The recipe that plain data describes.

        Raises:
            ConfigError: a key is unknown or missing, or a value does not fit.
            UnknownNameError: no such preset or kind of region.
        """
        _refuse_unknown("A recipe", data, ["name", *TABLES, "region"])
        _refuse_missing("A recipe", data, cls)
        tables = {name: _table(name, kind, data[name]) for name, kind in TABLES.items() if name in data}
        return cls(name=data["name"], region=_region(data["region"]), **tables)

    def to_toml(self) -> str:
        """The recipe as a file."""
        return toml.dumps(self.to_dict())


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with settings of the form `schedule.steps=50` replaced.

    Raises:
        ConfigError: there is no such file, it is not TOML, or a setting does not fit.
        UnknownNameError: no such preset or kind of region.
    """
    try:
        data = tomllib.loads(Path(path).read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"The recipe must be a TOML file, got {str(path)!r}, and there is none.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML, and it is not: {error}.") from None
    return Recipe.from_dict(toml.override(data, overrides))


def _region(data: Any) -> Region:
    _mapping("region", data)
    if "preset" not in data:
        if "kind" not in data:
            raise ConfigError("region must have a preset or a kind, as in preset = 'dppo-binary-tv'.")
        region = config_from_dict(data)
    else:
        more = {key: value for key, value in data.items() if key != "preset"}
        _text("region.preset", data["preset"])
        region = config_from_dict(_laid_over(config_to_dict(preset(data["preset"])), more, data["preset"]))
    checks.instance("region", region, (Region,))
    return region


def _laid_over(base: Mapping[str, Any], given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A preset's settings with some replaced; another `kind` replaces the whole object it names."""
    merged = dict(base)
    for key, value in given.items():
        before = base.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(before, Mapping)
            and value.get("kind", before["kind"]) == (before["kind"])
        ):
            value = _laid_over(before, value, name)
        merged[key] = value
    return merged


def _table(name: str, kind: type, data: Any) -> Any:
    _mapping(name, data)
    _refuse_unknown(f"[{name}]", data, [one.name for one in fields(kind)])
    _refuse_missing(f"[{name}]", data, kind)
    return kind(**data)


def _refuse_unknown(where: str, data: Mapping[str, Any], known: list[str]) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(f"{where} has no {key!r}.{nearest(str(key), known)} It has: {', '.join(known)}.")


def _refuse_missing(where: str, data: Mapping[str, Any], kind: type) -> None:
    missing = [
        one.name
        for one in fields(kind)
        if one.name not in data and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{where} must have {', '.join(missing)}. docs/reference/recipe.md lists every key.")


def _plain(table: Any) -> dict[str, Any]:
    return {one.name: value for one in fields(table) if (value := getattr(table, one.name)) is not None}


def _without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in data.items()
        if value is not None
    }


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a text, got {value!r}.")


def _truth(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}.")


def _mapping(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, got {value!r}.")
