"""Run directories of `trustrl run`. Only `recipe.toml` must exist; any other file may be missing or incomplete."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trustrl.errors import RecordError, TrustRLError
from trustrl.files import LARGEST_TOML, open_regular, parsed_toml, read_regular
from trustrl.recording import storage
from trustrl.recording.part_names import PartName
from trustrl.recording.record_files import RECORDS, sifted_in
from trustrl.recording.writers import SUPERSEDED, Sifted
from trustrl.runs.part import Part, counted
from trustrl.runs.readers import record_tables
from trustrl.runs.readers.files import Fault, Files, json_object, last_lines
from trustrl.runs.run import Status
from trustrl.runs.run_directory import LAST_WORDS, StoredRun, check_file, checked_result, checked_rows

NAME = "trustrl run directory"
LOOKS_FOR = "recipe.toml"

_SETTINGS = {
    "engine": ("engine", "name"), "model": ("model", "name"), "task": ("task", "name"),
    "steps_planned": ("schedule", "steps"), "updates_per_batch": ("schedule", "updates_per_batch"),
    "completions_per_prompt": ("schedule", "completions_per_prompt"), "seed": ("schedule", "seed"),
    "learning_rate": ("optimiser", "learning_rate"), "trainer_dtype": ("model", "dtype"),
    "sampler_dtype": ("sampler", "dtype"), "temperature": ("sampler", "temperature"),
    "top_p": ("sampler", "top_p"), "top_k": ("sampler", "top_k"), "min_p": ("sampler", "min_p"),
}  # fmt: skip


def read(files: Files) -> list[Part]:
    """Returns the run, or nothing if the folder has no recipe.toml.

    Raises:
        RecordError: If the recipe, the result, or a complete line of the metrics cannot be read.
    """
    folder = files.root
    if not files.matching("recipe.toml") and not any(fault.startswith("recipe.toml: ") for fault in files.faults):
        return []
    recipe = _recipe(folder)
    stored = StoredRun(folder)
    rows, evaluations = (checked_rows(stored, name) for name in ("metrics", "evaluation"))
    result = checked_result(stored)
    status, words = _ending(folder, finished=stored.finished)
    part = Part(
        source=NAME, name=str(recipe.get("name", "run")), rows=rows, evaluations=evaluations, recipe=recipe,
        rows_in="metrics.jsonl", evaluations_in="evaluation.jsonl",
        status=status, last_words=words, seconds=result.get("seconds"), settings=_settings(recipe, files),
    )  # fmt: skip
    part.engine = part.settings.get("engine")
    part.row_is = "batch" if part.engine == "verl" else "update"
    part.found += [f"{counted(len(rows), 'row')} of metrics in metrics.jsonl"] * bool(rows)
    part.found += [f"{counted(len(evaluations), 'evaluation')} in evaluation.jsonl"] * bool(evaluations)
    part.faults += [
        f"{name}.jsonl: the last line is truncated; left out"
        for name in ("metrics", "evaluation")
        if _torn(folder, name)
    ]
    return [part]


def _recipe(folder: Path) -> dict[str, Any]:
    check_file(folder / "recipe.toml")
    try:
        return parsed_toml(read_regular(folder / "recipe.toml", LARGEST_TOML))
    except (ValueError, OSError) as error:
        raise RecordError(f"{folder / 'recipe.toml'} must be valid TOML, got {error}.") from None


def _torn(folder: Path, name: str) -> bool:
    file = folder / f"{name}.jsonl"
    if not file.is_file() or not file.stat().st_size:
        return False
    with open_regular(file) as opened:
        opened.seek(-1, 2)
        return opened.read() != b"\n"


def _settings(recipe: Mapping[str, Any], files: Files) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, (table, key) in _SETTINGS.items():
        values = recipe.get(table)
        if isinstance(values, Mapping) and values.get(key) is not None:
            settings[name] = values[key]
    if isinstance(updates := settings.get("updates_per_batch"), bool) or not isinstance(updates, int) or updates < 1:
        settings["updates_per_batch"] = 1
    if isinstance(recipe.get("region"), Mapping):
        settings["region"] = dict(recipe["region"])
    if files.matching("environment.json"):
        environment = json_object(files.root / "environment.json", "environment.json")
        packages = {} if isinstance(environment, Fault) else environment.get("packages")
        if isinstance(packages, Mapping):
            settings["engine_version"] = packages.get(str(settings.get("engine")))
    return settings


def _ending(folder: Path, *, finished: bool) -> tuple[Status, str]:
    """Returns the status, and the last lines of the log that `trustrl compare` writes next to the folder."""
    if finished:
        return "finished", ""
    lines = last_lines(folder.resolve().with_suffix(".log"), LAST_WORDS)
    failed = any(line.startswith(("error:", "Traceback")) for line in lines)
    return "failed" if failed else "unfinished", "\n".join(lines)


def records_in(files: Files) -> list[Part]:
    """Returns the folders of token records: the folder itself, or `records` inside it."""
    here = any(PartName.of(name) for name in files.names)  # another trainer's folder may have other Parquet files
    folders = [*([files.root] if here else []), storage.inside(files.root, RECORDS)]
    sifted = {folder: sifted_in(folder)[1] for folder in folders}
    return [_records(str(folder), files.short(folder), parts) for folder, parts in sifted.items() if parts.visible]


def _records(folder: str, short: str, parts: Sifted) -> Part:
    replaced = len(parts.superseded) + len(storage.entries(storage.place(folder) / SUPERSEDED, "step-*.parquet"))
    more = f"; {counted(replaced, 'file')} that a later process replaced left out" * bool(replaced)
    part = Part(
        source="token records",
        records=(folder,),
        found=[f"token records in {short}, {counted(len(parts.visible), 'file')}{more}"],
    )
    try:
        part.settings = record_tables.settings(folder)
        part.engine = part.settings.get("engine")
        if record_tables.has_sequences(folder):
            part.completions = partial(record_tables.completions, folder)
            part.found.append(f"completions with prompts and rewards in {short}/sequences")
    except TrustRLError as error:
        part.faults.append(str(error))
    return part
