"""Command-line arguments that several verbs share, and helpers that validate their values."""

import argparse
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from trustrl.config.axes import Region
from trustrl.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
"""Suffixes of a picture."""


def add_recipe(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds RECIPE and its overrides, for every verb that takes a recipe."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs=None if required else "?",
        help="TOML file, or a name that `trustrl recipes` lists",
    )
    parser.add_argument(
        "settings",
        metavar="table.key=value",
        nargs="*",
        default=[],
        help="Override a setting, such as schedule.steps=50 or region.divergence.max_increase=0.2",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds --trust-checkpoint, for every verb that resumes runs."""
    parser.add_argument(
        "--trust-checkpoint", action="store_true",
        help="Load a checkpoint that others wrote, own or can write to. Loading one can execute code",
    )  # fmt: skip


def add_records(parser: argparse.ArgumentParser, *, nargs: str | None = "+") -> None:
    """Adds RECORDS and the options for reading them, for every verb that reads records; one folder if nargs is None."""
    what = "Record folders, run directories, or record files: paths, or addresses"
    parser.add_argument(
        "records", metavar="RECORDS", nargs=nargs,
        help=f"{what if nargs else 'Record folder or run directory: a path, or an address'} such as s3://bucket/run",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object")
    parser.add_argument("--workers", type=int, default=1, help="Number of parallel processes (default: 1)")
    parser.add_argument("--ray", action="store_true", help="Read the records on a Ray cluster with Ray Data")


def add_anchor(parser: argparse.ArgumentParser) -> None:
    """Adds --anchor, for every verb that measures recorded tokens from μ."""
    parser.add_argument(
        "--anchor", choices=("behavior", "proximal"),
        help="Log-probs of μ: the sampler's, or the trainer's at the rollout weights (default: the sampler's if "
        "recorded)",
    )  # fmt: skip


def add_regions(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --regions and --arms, for every verb that takes several regions."""
    parser.add_argument("--regions", metavar="a,b,c", help=f"Presets or arms to {what} (default: every arm)")
    parser.add_argument("--arms", type=Path, metavar="FILE", help="Load more regions from a TOML file, one table each")


def regions_of(options: argparse.Namespace, otherwise: Sequence[str] = ()) -> dict[str, Region]:
    """Returns the regions that --regions and --arms name, by name; the presets in `otherwise` if they name none.

    Raises:
        ConfigError: If the arms file is invalid, no region is chosen, or a region is named twice.
        UnknownNameError: If a name is neither an arm nor a preset.
    """
    from trustrl.runner.grid import chosen
    from trustrl.runner.recipe import load_arms

    arms = load_arms(options.arms) if options.arms else {}
    if options.arms and not arms:
        raise ConfigError(f"--arms must have a table for each region, got none in {options.arms}.")
    names = [name.strip() for name in (options.regions or "").split(",") if name.strip()]
    if options.regions is not None and not names:
        raise ConfigError(f"--regions must name presets or arms, got {options.regions!r}.")
    return chosen(names or ([] if arms else otherwise), arms)


@contextmanager
def written(option: str, file: Path) -> Iterator[None]:
    """Converts errors of the operating system, raised while writing an option's file, to usage errors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option} must be a writable file, got {str(file)!r}: {error.strerror}. Choose another path."
        ) from None


def check_writable(option: str, file: Path) -> None:
    """Checks that a file can be written, before the work for it starts.

    Raises:
        ConfigError: If the path is a folder, or its parent folder is not writable.
    """
    with written(option, file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=file.parent):
            pass


def check_picture(option: str, file: Path) -> None:
    """Checks that a file has the suffix of a picture."""
    if file.suffix not in FORMATS:
        raise ConfigError(f"{option} must end with {', '.join(FORMATS)}, got {str(file)!r}.")


def prepare_file(option: str, file: Path) -> None:
    """Creates the parent folders of a file and checks that it can be written.

    Raises:
        ConfigError: If it cannot.
    """
    with written(option, file):
        if not file.parent.exists():
            file.parent.mkdir(parents=True)
    check_writable(option, file)


def tokenizer_of(option: str, name: str) -> Any:
    """Loads the tokenizer of a known model, a folder, or a hub id.

    Raises:
        ConfigError: If the tokenizer cannot be loaded.
        UnknownNameError: If the name is not a known model, a folder, or a hub id.
        MissingPackageError: If transformers is not installed.
    """
    from trustrl.optional_imports import need
    from trustrl.world import models

    auto = need("transformers", extra="models").AutoTokenizer
    where = models.path(name)
    try:
        return auto.from_pretrained(where)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{option} must be a model name or folder with a tokenizer, got {name!r}: {first}") from None
