"""Configuration that hydra stores for a verl run: `.hydra/config.yaml`."""

from typing import Any

from trustrl.errors import MissingPackageError
from trustrl.files import bounded, read_regular
from trustrl.optional_imports import need
from trustrl.runs.engine_settings import settings_of
from trustrl.runs.part import Part
from trustrl.runs.readers.files import Files

NAME = "hydra configuration"
LOOKS_FOR = ".hydra/config.yaml"
LARGEST = 1_000_000
"""Bytes of the largest file. A node of YAML takes 1,000 times the memory of its sign."""


def read(files: Files) -> list[Part]:
    """Returns the settings of the configuration, if it is verl's."""
    patterns = (".hydra/config.yaml", "*/.hydra/config.yaml", "*/*/.hydra/config.yaml", "*/*/*/.hydra/config.yaml")
    parts: list[Part] = []
    for file in files.matching(*patterns, *(["config.yaml"] if len(files.names) == 1 else [])):
        part = Part(source=NAME)
        short = files.short(file)
        try:
            config = _loaded(read_regular(file, LARGEST))
        except MissingPackageError:
            part.faults.append(f"{short}: PyYAML is not installed; no settings from it")
        except (OSError, ValueError) as error:
            part.faults.append(f"{short}: {str(error).splitlines()[0]}; left out")
        else:
            part.engine, part.settings = settings_of(config)
            if part.engine is None:
                continue
            part.found.append(f"settings in {short}")
        parts.append(part)
    return parts


def _loaded(text: bytes) -> dict[Any, Any]:
    """Returns the table in YAML text. Loads plain values only.

    Raises:
        ValueError: If the text is not a table in YAML.
        MissingPackageError: If PyYAML is not installed.
    """
    yaml = need("yaml", extra="verl")
    try:
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, UnicodeError) as error:
        raise ValueError(f"not valid YAML ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise ValueError("not a table")
    return bounded(content)
