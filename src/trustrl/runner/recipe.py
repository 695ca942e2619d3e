"""A recipe: everything that one training run follows from, on any engine. See docs/reference/recipe.md."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trustrl.config import checks
from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict, config_to_dict
from trustrl.config.presets import override, preset
from trustrl.errors import ConfigError
from trustrl.recording.files import RECORDS
from trustrl.recording.settings import Recording
from trustrl.registry import nearest
from trustrl.runner import recipe_tables, toml
from trustrl.runner.recipe_tables import TABLES, Engine, Evaluation, Model, Optimiser, Sampler, Schedule, TaskChoice
from trustrl.runner.shipped import file_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RECORD_KEYS = tuple(one.name for one in fields(Recording) if one.name != "folder")
"""What [records] may say."""


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
    records: Recording | None = None
    """Which tokens the run writes down; none unless told. Its `folder` is not read: the run's own has one for them."""

    def __post_init__(self) -> None:
        recipe_tables.folder_name("name", self.name)
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
        elif self.sampler.kind == "transformers" and self.sampler.dtype != self.model.dtype:
            raise ConfigError(
                f"sampler.dtype must be the model's, {self.model.dtype!r}, where TRL samples with transformers, got "
                f"{self.sampler.dtype!r}. It is the trainer's own network."
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
                "sampler.kind must be 'vllm' for verl on GPUs, got 'transformers', which is its sampler on a CPU."
            )

    def recording(self, folder: Path) -> Recording | None:
        """What is recorded where, of a run in `folder`; None where nothing is."""
        return None if self.records is None else replace(self.records, folder=folder / RECORDS)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal recipe; the region in full."""
        plain = {name: _plain(getattr(self, name)) for name in TABLES}
        plain["region"] = _without_none(config_to_dict(self.region))
        if self.records is not None:
            given = _without_none(config_to_dict(self.records))
            plain["records"] = {key: given[key] for key in RECORD_KEYS}
        return {"name": self.name, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """The recipe that plain data describes.

        Raises:
            ConfigError: a key is unknown or missing, or a value does not fit.
            UnknownNameError: no such preset or kind of region.
        """
        _refuse_unknown("A recipe", data, ["name", *TABLES, "region", "records"])
        _refuse_missing("A recipe", data, cls)
        given = {name: _table(name, kind, data[name]) for name, kind in TABLES.items() if name in data}
        if "records" in data:
            given["records"] = _records(data["records"])
        return cls(name=data["name"], region=_region(data["region"]), **given)

    def to_toml(self) -> str:
        """The recipe as a file."""
        return toml.dumps(self.to_dict())


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, or the one of that name that comes with trustrl, with settings replaced.

    An override has the form `schedule.steps=50`.

    Raises:
        ConfigError: there is no such file, it is not TOML, or a setting does not fit.
        UnknownNameError: no such recipe, preset or kind of region.
    """
    return Recipe.from_dict(toml.override(_read("The recipe", file_of(path)), overrides))


def load_arms(path: str | Path) -> dict[str, Region]:
    """The regions to compare, by name: a TOML file whose tables are each written like a recipe's [region].

    Raises:
        ConfigError: there is no such file, it is not TOML, or a setting does not fit.
        UnknownNameError: no such preset or kind of region.
    """
    arms = {name: _region(data, name) for name, data in _read("The arms", path).items()}
    for name in arms:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"An arm's name must be letters, digits, '.', '_' and '-', got {name!r}. It names a folder."
            )
    return arms


def _read(what: str, path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{what} must be a TOML file, got {str(path)!r}, and there is none.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML, and it is not: {error}.") from None


def _region(data: Any, where: str = "region") -> Region:
    recipe_tables.mapping(where, data)
    if "preset" not in data:
        if "kind" not in data:
            raise ConfigError(f"{where} must have a preset or a kind, as in preset = 'dppo-binary-tv'.")
        region = config_from_dict(data)
    else:
        more = {key: value for key, value in data.items() if key != "preset"}
        recipe_tables.text(f"{where}.preset", data["preset"])
        region = override(preset(data["preset"]), more)
    checks.instance(where, region, (Region,))
    return region


def _records(data: Any) -> Recording:
    recipe_tables.mapping("records", data)
    if "folder" in data:
        raise ConfigError(
            f"records.folder must be left out, got {data['folder']!r}. Records are in `{RECORDS}` of the run's folder."
        )
    _refuse_unknown("[records]", data, list(RECORD_KEYS))
    return Recording.of({"folder": RECORDS, **data})


def _table(name: str, kind: type, data: Any) -> Any:
    recipe_tables.mapping(name, data)
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


def _without_none(data: Any) -> Any:
    if isinstance(data, list):
        return list(map(_without_none, data))
    if not isinstance(data, Mapping):
        return data
    return {key: _without_none(value) for key, value in data.items() if value is not None}
