"""run.json of a record: versions, model, sampling settings and region of the run. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from os import PathLike
from typing import Any

from trustrl import __version__
from trustrl.errors import ConfigError, RecordError
from trustrl.files import shortened
from trustrl.recording import storage
from trustrl.recording.checksums import checked_json, sealed_json
from trustrl.recording.record_files import RUN
from trustrl.recording.schema import VERSION
from trustrl.recording.storage import Place, Remote

PACKAGES = ("torch", "pyarrow", "transformers", "accelerate", "trl", "verl", "vllm", "sglang", "ray")
"""Packages whose versions are always recorded, if they are installed."""

_TEXT = {"type": ["string", "null"]}

RUN_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "run.json of a trustrl token record",
    "type": "object",
    "required": [
        "version", "trustrl", "engine", "packages", "model", "tokenizer", "dtypes", "sampling", "region", "recording",
        "started",
    ],
    "properties": {
        "version": {"description": "version of this specification", "type": "integer", "minimum": 3},
        "trustrl": {"description": "version of trustrl", "type": "string"},
        "engine": {
            "description": "trainer that produced the record",
            "type": ["object", "null"],
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "version": _TEXT, "settings": {"type": ["object", "null"]}},
        },
        "packages": {
            "description": "versions of installed packages by name",
            "type": "object",
            "additionalProperties": {"type": "string"},
        },
        "model": {"description": "name or path of the model", **_TEXT},
        "tokenizer": {"description": "name or path of the tokenizer", **_TEXT},
        "dtypes": {
            "description": "number formats of the weights",
            "type": ["object", "null"],
            "properties": {"trainer": _TEXT, "sampler": _TEXT},
        },
        "sampling": {
            "description": "settings of the sampler",
            "type": ["object", "null"],
            "properties": {
                "temperature": {"type": ["number", "null"]},
                "top_p": {"type": ["number", "null"]},
                "top_k": {"type": ["integer", "null"]},
                "min_p": {"type": ["number", "null"]},
            },
        },
        "region": {"description": "settings of the trust region; null without one", "type": ["object", "null"]},
        "region_role": {"description": "'observed' if another loss trained; null if the region did", **_TEXT},
        "recording": {"description": "settings of the recording, without its folder", "type": "object"},
        "run": {"description": "random name of the run, if its launcher gave it one", **_TEXT},
        "started": {"description": "time at which the process started recording, ISO 8601 in UTC", "type": "string"},
        "checksum": {"description": "CRC-32 of the other keys, as `crc32:` and 8 digits", **_TEXT},
    },
}  # fmt: skip
"""JSON Schema of run.json. Other keys are allowed, and a reader ignores them."""

ABOUT = ("engine", "packages", "model", "tokenizer", "dtypes", "sampling", "region_role")
"""Keys of `Recorder(about=...)`."""


def run_description(
    about: Mapping[str, Any] | None,
    *,
    region: Mapping[str, Any] | None,
    recording: Mapping[str, Any],
    run: str | None = None,
) -> dict[str, Any]:
    """Returns the content of run.json.

    Raises:
        ConfigError: If `about` has an unknown key, or a value of the wrong type.
    """
    about = about or {}
    unknown = sorted(set(about) - set(ABOUT))
    if unknown:
        raise ConfigError(f"about must have keys in {', '.join(ABOUT)}, got {', '.join(unknown)}. Remove them.")
    description = {
        "version": VERSION, "trustrl": __version__,
        **{name: about.get(name) for name in ABOUT},
        "packages": installed() | dict(about.get("packages") or {}),
        "region": None if region is None else dict(region), "recording": dict(recording),
        "run": run, "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    for place, rule in violations(description):
        raise ConfigError(f"about{place.removeprefix('run')} must be {rule}.")
    return description


def installed(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of these packages, without those that are not installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def stated_run(folder: Place) -> dict[str, Any] | None:
    """Returns the content of run.json, or None if there is none that can be read."""
    try:
        return read_run(folder)
    except RecordError:
        return None


def write_run(folder: Place, description: Mapping[str, Any]) -> None:
    """Writes run.json atomically."""
    storage.write_text(folder / RUN, sealed_json(description))


def read_run(path: str | PathLike[str] | Remote) -> dict[str, Any] | None:
    """Returns run.json of a record folder, or None if it has none, as before version 3.

    Raises:
        RecordError: If the file is not as the specification says, or a newer trustrl wrote it.
    """
    file = storage.inside(storage.place(path), RUN)
    try:
        run = checked_json(storage.read_bytes(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(f"`{file}` must be a JSON file, got: {str(error).rstrip('.')}.") from error
    for place, rule in violations(run):
        raise RecordError(f"`{file}` must have {place} that is {rule}.")
    if run["version"] > VERSION:
        raise RecordError(
            f"`{file}` must have version {VERSION} or lower, got {run['version']}. Install a newer trustrl."
        )
    return run


_KINDS: dict[str, Any] = {
    "object": dict, "string": str, "integer": int, "number": (int, float), "null": type(None),
}  # fmt: skip


def violations(data: Any, schema: Mapping[str, Any] = RUN_SCHEMA, place: str = "run") -> Iterator[tuple[str, str]]:
    """Yields each place that breaks the schema, with the rule it breaks.

    Example:
        >>> next(violations({"version": "3"}, {"properties": {"version": {"type": "integer"}}}))
        ('run.version', "of type integer, got '3'")
    """
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = any(isinstance(data, _KINDS[kind]) and not isinstance(data, bool) for kind in kinds)
    if kinds and not fits:
        yield place, f"of type {' or '.join(kinds)}, got {shortened(repr(data))}"
    elif isinstance(data, Mapping):
        for name in schema.get("required", ()):
            if name not in data:
                yield f"{place}.{name}", "present, got nothing"
        for name, value in data.items():
            rule = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if rule is not None:
                yield from violations(value, rule, f"{place}.{name}")
    elif "minimum" in schema and data < schema["minimum"]:
        yield place, f"at least {schema['minimum']}, got {data!r}"
