"""Recipe of a training run: all its settings, on any engine. See docs/reference/recipe.md."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trustrl.config import validators
from trustrl.config.axes import Region
from trustrl.errors import ConfigError
from trustrl.files import LARGEST_TOML, parsed_toml, read_regular
from trustrl.recording.record_files import RECORDS
from trustrl.recording.recording_settings import Recording
from trustrl.regions.loading import config_from_dict, config_to_dict
from trustrl.regions.presets import override, preset
from trustrl.registry import nearest
from trustrl.runner import recipe_files
from trustrl.runner.algorithm_tables import Advantage, LoRA, Loss
from trustrl.runner.layout import Layout
from trustrl.runner.recipe_tables import (
    TABLES,
    Engine,
    Evaluation,
    Logging,
    Model,
    Optimiser,
    Sampler,
    Schedule,
    TaskChoice,
    folder_name,
)
from trustrl.world.rewards import RewardFunction
from trustrl.world.tasks.own_data import DataSet, OwnData, table_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LEFT_OUT = ("folder", "spool", "spool_bytes")
"""Settings of a recording that a recipe does not have: its records are in the run directory."""

OWN_DATA = "data"
"""Name of the task that [data] and [reward] make."""

DATA_TABLES: dict[str, type] = {"data": DataSet, "reward": RewardFunction}
"""Tables that a recipe may have instead of [task], once or several times."""

RECORD_KEYS = tuple(setting.name for setting in fields(Recording) if setting.name not in LEFT_OUT)
"""Keys that [records] accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All settings of one run."""

    name: str
    """Name of the run."""

    model: Model
    task: TaskChoice
    engine: Engine
    region: Region
    """`preset = "<name>"` with the settings that differ from it, or a `kind` with all its settings."""

    optimiser: Optimiser
    schedule: Schedule
    layout: Layout = field(default_factory=Layout)
    sampler: Sampler = field(default_factory=Sampler)
    evaluation: Evaluation = field(default_factory=Evaluation)
    logging: Logging = field(default_factory=Logging)
    advantage: Advantage = field(default_factory=Advantage)
    loss: Loss = field(default_factory=Loss)
    lora: LoRA | None = None
    """None trains all weights."""

    records: Recording | None = None
    """Settings of the token records. None records nothing. `folder` is ignored: records go into the run directory."""

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        validators.instance("region", self.region, (Region,))
        replicas, sequences = self.layout.replicas(self.engine.ranks), self.schedule.sequences_per_step
        if sequences % replicas:
            share = "ranks" if replicas == self.engine.ranks else "replicas of the model"
            raise ConfigError(
                f"schedule.prompts_per_step × completions_per_prompt must be a multiple of the {replicas} {share}, got "
                f"{sequences}."
            )
        if self.engine.micro_batch is not None and (sequences // replicas) % self.engine.micro_batch:
            raise ConfigError(
                f"engine.micro_batch must divide a rank's share of a step, {sequences // replicas} sequences, got "
                f"{self.engine.micro_batch}."
            )
        if self.engine.ranks_per_node % self.sampler.ranks:
            raise ConfigError(
                f"sampler.ranks must divide engine.ranks_per_node, {self.engine.ranks_per_node}, got "
                f"{self.sampler.ranks}."
            )
        if self.task.problems is not None and self.task.problems < self.schedule.prompts_per_batch:
            raise ConfigError(
                f"task.problems must be at least the {self.schedule.prompts_per_batch} prompts of a batch, got "
                f"{self.task.problems}."
            )
        labels = [DataSet(**table).label for table in self.task.settings.get("data", ())]
        for block in self.evaluation.blocks():
            if block.data not in labels:
                raise ConfigError(
                    f"evaluation.sets.data must name a set of [data], got {block.data!r}. The recipe has: "
                    f"{', '.join(labels) or 'none'}."
                )
        if self.engine.name == "verl":
            self._check_verl()
            return
        if self.advantage.estimator != "group" or self.loss.entropy:
            raise ConfigError(
                "advantage.estimator must be 'group' and loss.entropy 0 on TRL, got "
                f"{self.advantage.estimator!r} and {self.loss.entropy}. Only verl has the others."
            )
        if self.layout.chosen():
            raise ConfigError(
                f"[layout] must be left out on TRL, got {', '.join(self.layout.chosen())}. Only verl reads it."
            )
        if self.sampler.kind == "transformers" and self.sampler.dtype != self.model.dtype:
            raise ConfigError(
                f"sampler.dtype must be the model's, {self.model.dtype!r}, when TRL samples with transformers, got "
                f"{self.sampler.dtype!r}. The sampler is then the trainer's network."
            )

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
                "sampler.kind must be 'vllm' for verl on GPUs, got 'transformers', which verl supports on CPUs only."
            )
        if self.layout.megatron and self.engine.device != "cpu" and self.model.dtype == "float32":
            raise ConfigError(
                "model.dtype must be 'bfloat16' or 'float16' for Megatron on GPUs, got 'float32'. Its optimizer keeps "
                "a float32 copy."
            )

    def recording(self, folder: Path) -> Recording | None:
        """Returns the recording settings of a run in `folder`, or None if the recipe records nothing."""
        return None if self.records is None else replace(self.records, folder=folder / RECORDS)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that `from_dict` reads back as an equal recipe. Contains all settings of the region."""
        tables = {name: asdict(table) for name in TABLES if (table := getattr(self, name)) is not None}
        plain = recipe_files.without_none(tables)
        if self.task.name == OWN_DATA:
            del plain["task"]
            plain |= self.task.settings
        plain["region"] = recipe_files.without_none(config_to_dict(self.region))
        if self.records is not None:
            records = recipe_files.without_none(config_to_dict(self.records))
            plain["records"] = {key: records[key] for key in RECORD_KEYS}
        return {"name": self.name, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """Builds a recipe from plain data.

        Raises:
            ConfigError: If a key is unknown or missing, or a value is invalid.
            UnknownNameError: If no such preset or kind of region exists.
        """
        _refuse_unknown("A recipe", data, ["name", *TABLES, *DATA_TABLES, "region", "records"])
        if DATA_TABLES.keys() & data.keys():
            data = {name: table for name, table in data.items() if name not in DATA_TABLES} | {"task": _own_data(data)}
        _refuse_missing("A recipe", data, cls)
        tables = {name: _table(name, kind, data[name]) for name, kind in TABLES.items() if name in data}
        if "records" in data:
            tables["records"] = _records(data["records"])
        return cls(name=data["name"], region=_region(data["region"]), **tables)

    def to_toml(self) -> str:
        """Returns the recipe as TOML text.

        Raises:
            MissingPackageError: If tomli-w is not installed.
        """
        return recipe_files.dumps(self.to_dict())


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe from a TOML file, or a shipped recipe by name, and applies overrides.

    An override has the form `schedule.steps=50`. A recipe may extend another: `extends = "<name or file>"`.

    Raises:
        ConfigError: If the file does not exist or is not TOML, or if a setting is invalid.
        UnknownNameError: If no such recipe, preset or kind of region exists.
    """
    return Recipe.from_dict(recipe_files.override(_extended(recipe_files.file_of(path)), overrides))


def _extended(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the tables of a recipe file, with those of the recipe that it extends."""
    data = _read("The recipe", file)
    base = data.pop("extends", None)
    if base is None:
        return data
    validators.text("extends", base)
    next_file = recipe_files.file_of(file.parent / base if base.endswith(".toml") else base)
    if next_file.resolve() in (*above, file.resolve()):
        raise ConfigError(f"extends must not lead back to the same recipe, got {base!r} in {file}.")
    return recipe_files.extended(_extended(next_file, (*above, file.resolve())), data)


def load_arms(path: str | Path) -> dict[str, Region]:
    """Loads the regions to compare, by name, from a TOML file. Each table has the form of a recipe's [region].

    Raises:
        ConfigError: If the file does not exist or is not TOML, or if a setting is invalid.
        UnknownNameError: If no such preset or kind of region exists.
    """
    arms = {name: _region(data, name) for name, data in _read("The arms", path).items()}
    for name in arms:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"An arm's name must consist of letters, digits, '.', '_' and '-', got {name!r}. It names a directory."
            )
    return arms


def check_enough(recipe: Recipe, problems: int) -> None:
    """Raises if there are fewer training problems than a batch needs."""
    if problems < recipe.schedule.prompts_per_batch:
        raise ConfigError(
            f"The data must have at least the {recipe.schedule.prompts_per_batch} prompts of a batch to train on, got "
            f"{problems}. Lower schedule.prompts_per_step, or data.held_out."
        )


def _read(what: str, path: str | Path) -> dict[str, Any]:
    try:
        return parsed_toml(read_regular(Path(path), LARGEST_TOML))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{what} must be a TOML file, got {str(path)!r}, which does not exist.") from None
    except OSError as error:
        raise ConfigError(f"{what} must be a TOML file, got {str(path)!r}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML, got: {error}.") from None


def _region(data: Any, where: str = "region") -> Region:
    validators.table(where, data)
    if "preset" not in data:
        if "kind" not in data:
            raise ConfigError(
                f"{where} must have a preset or a kind, got neither. "
                "Write for example preset = 'dppo-binary-tv-capped'."
            )
        region = config_from_dict(data)
    else:
        more = {key: value for key, value in data.items() if key != "preset"}
        validators.text(f"{where}.preset", data["preset"])
        region = override(preset(data["preset"]), more)
    validators.instance(where, region, (Region,))
    return region


def _records(data: Any) -> Recording:
    validators.table("records", data)
    if "folder" in data:
        raise ConfigError(
            f"records.folder must be left out, got {data['folder']!r}. Records go to `{RECORDS}` in the run directory."
        )
    _refuse_unknown("[records]", data, list(RECORD_KEYS))
    return Recording.of({"folder": RECORDS, **data})


def _own_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the task that [data] and [reward] make, each a table or a list of tables."""
    if "task" in data:
        raise ConfigError("A recipe must have either [task], or [data] and [reward], got both.")
    tables = {
        name: [
            table_of(kind, name, table)
            for table in (data.get(name, ()) if isinstance(data.get(name, ()), (list, tuple)) else [data[name]])
        ]
        for name, kind in DATA_TABLES.items()
    }
    OwnData(data=tables["data"], reward=tables["reward"])
    settings = {name: [recipe_files.without_none(asdict(table)) for table in tables[name]] for name in DATA_TABLES}
    return {"name": OWN_DATA, "chat": tables["data"][0].chat, "problems": None, "settings": settings}


def _table(name: str, kind: type, data: Any) -> Any:
    validators.table(name, data)
    _refuse_unknown(f"[{name}]", data, [setting.name for setting in fields(kind)])
    _refuse_missing(f"[{name}]", data, kind)
    return kind(**data)


def _refuse_unknown(where: str, data: Mapping[str, Any], known: list[str]) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(f"{where} has no {key!r}.{nearest(str(key), known)} It has: {', '.join(known)}.")


def _refuse_missing(where: str, data: Mapping[str, Any], kind: type) -> None:
    missing = [
        setting.name
        for setting in fields(kind)
        if setting.name not in data and setting.default is MISSING and setting.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(
            f'{where} must have {", ".join(missing)}. The documentation\'s page "Recipe keys" lists every key.'
        )
