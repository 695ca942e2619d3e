"""Version requirements declared in package metadata, such as `torch>=2.13` or `trl>=1.15,<2; extra == "trl"`.

Parsing requires the optional package `packaging`. Requirements with a marker other than a single extra (a platform,
a Python version) are skipped.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.optional_imports import need, shipped_folder

EXTRA = re.compile(r"""extra == ['"]([\w.-]+)['"]""")
"""A marker with a single extra, in the form that `packaging` prints."""

CHECKOUT = Path(__file__).parents[4]
"""Root of the source checkout, which contains pyproject.toml."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Package name, allowed versions, and the extra that requires it ("" if none)."""

    package: str
    specifiers: Any
    """A `packaging.specifiers.SpecifierSet`."""

    extra: str = ""

    def __str__(self) -> str:
        """Returns the specifiers with lower bounds first, such as `>=1.15,<2`."""
        return ",".join(sorted(map(str, self.specifiers), key=lambda bound: (bound.startswith("<"), bound))) or "any"

    def allows(self, version: str) -> bool:
        """Returns whether a version satisfies every specifier. Pre-releases count; invalid versions do not."""
        invalid = need("packaging.version", extra="doctor").InvalidVersion
        try:
            return self.specifiers.contains(version, prereleases=True)
        except invalid:
            return False


def can_parse() -> bool:
    """Returns whether `packaging` is installed."""
    return find_spec("packaging") is not None


def parse(line: str) -> Requirement | None:
    """Parses one requirement. Returns None if it is invalid or has a marker other than a single extra.

    Raises:
        MissingPackageError: If packaging is not installed.

    Example:
        >>> wanted = parse('trl<2,>=1.15; extra == "trl"')
        >>> wanted.package, str(wanted), wanted.extra, wanted.allows("1.16.0"), wanted.allows("2.0")
        ('trl', '>=1.15,<2', 'trl', True, False)
    """
    packaging = need("packaging.requirements", extra="doctor")
    try:
        requirement = packaging.Requirement(line)
    except packaging.InvalidRequirement:
        return None
    extra = EXTRA.fullmatch(str(requirement.marker)) if requirement.marker else None
    if requirement.marker and extra is None:
        return None
    return Requirement(_normalized(requirement.name), requirement.specifier, extra[1] if extra else "")


def parse_all(lines: Iterable[str]) -> list[Requirement]:
    """Parses several requirements and drops those that `parse` skips."""
    return [requirement for line in lines if (requirement := parse(line)) is not None]


def ours() -> list[Requirement]:
    """Returns trustrl's requirements, from pyproject.toml in a checkout or from the installed package."""
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = table.get("optional-dependencies", {})
        marked = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
        return parse_all([*table["dependencies"], *marked])
    return of_package("trustrl")


def python() -> tuple[str | None, str | None]:
    """Returns the Python range that trustrl declares and the versions its classifiers list."""
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        declared, classifiers = table.get("requires-python"), table.get("classifiers", [])
    elif installed("trustrl"):
        about = metadata.metadata("trustrl")
        declared, classifiers = about["Requires-Python"], about.get_all("Classifier") or []
    else:
        return None, None
    named = re.findall(r"Python :: (\d\.\d+)", " ".join(classifiers))
    return declared, ", ".join(named) or None


def of_package(package: str) -> list[Requirement]:
    """Returns the requirements of an installed package, or an empty list if it is not installed."""
    try:
        return parse_all(metadata.requires(package) or [])
    except metadata.PackageNotFoundError:
        return []


def tested() -> dict[str, dict[str, str]]:
    """Returns the pinned version of each package in each test environment, from `environments/*.txt`."""
    versions: dict[str, dict[str, str]] = {}
    for file in sorted(shipped_folder("environments").glob("*.txt")):
        lines = (
            line.partition("==") for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
        )
        versions[file.stem] = {_normalized(name): version.rstrip(" \\") for name, _, version in lines if version}
    return versions


def installed(package: str) -> str | None:
    """Returns the installed version without importing the package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
