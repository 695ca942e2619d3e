"""What packages require of each other, as their metadata declares it: `torch>=2.13`, `trl>=1.15,<2; extra == "trl"`.

Only what is needed here is read: names, comparisons of release numbers and extras. A requirement with any other marker
(a platform, a Python version) is left alone.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trustrl.engines.seam import leading_numbers
from trustrl.packages import shipped_folder

FORM = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;\s*(.*))?")
EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
RULE = re.compile(r"(===|==|!=|~=|>=|<=|>|<)\s*([\w.*+!-]+)")
CHECKOUT = Path(__file__).parents[3]
"""The folder with pyproject.toml, where trustrl is run from its source."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, the versions that are meant, and the extra that asks for it ("" for all)."""

    package: str
    rules: tuple[tuple[str, str], ...]
    extra: str = ""

    def __str__(self) -> str:
        return ",".join(f"{how}{version}" for how, version in self.rules) or "any"

    def allows(self, version: str) -> bool:
        """Whether a version satisfies every rule, by its release numbers."""
        return all(_holds(how, leading_numbers(version), wanted) for how, wanted in self.rules)


def _holds(how: str, found: tuple[int, ...], text: str) -> bool:
    wanted = leading_numbers(text)
    length = max(len(found), len(wanted))
    left, right = (x + (0,) * (length - len(x)) for x in (found, wanted))
    match how:
        case "==" | "===":
            return left[: len(wanted)] == wanted if text.endswith("*") else left == right
        case "!=":
            return left[: len(wanted)] != wanted if text.endswith("*") else left != right
        case "~=":
            return left >= right and left[: len(wanted) - 1] == wanted[:-1]
        case ">=":
            return left >= right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left < right


def parse(line: str) -> Requirement | None:
    """One requirement; None where it has another form, or a marker about something else than an extra.

    Example:
        >>> wanted = parse('trl<2,>=1.15; extra == "trl"')
        >>> wanted.package, str(wanted), wanted.extra, wanted.allows("1.16.0"), wanted.allows("2.0")
        ('trl', '<2,>=1.15', 'trl', True, False)
    """
    found = FORM.fullmatch(line)
    if found is None or RULE.sub("", found[2]).strip(" ,"):
        return None
    package, rules, marker = found.groups()
    extra = EXTRA.fullmatch((marker or "").strip())
    if marker and extra is None:
        return None
    return Requirement(_plain(package), tuple(RULE.findall(rules)), extra[1] if extra else "")


def parse_all(lines: Iterable[str]) -> list[Requirement]:
    """Those that can be read."""
    return [requirement for line in lines if (requirement := parse(line)) is not None]


def ours() -> list[Requirement]:
    """trustrl's own, from the installed package, or from pyproject.toml where it is run from its source."""
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = table.get("optional-dependencies", {})
        marked = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
        return parse_all([*table["dependencies"], *marked])
    return of_package("trustrl")


def python() -> tuple[str | None, str | None]:
    """The range of Python that trustrl declares, and the versions its classifiers name, from the same place."""
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
    """What an installed package requires; nothing where it is not installed."""
    try:
        return parse_all(metadata.requires(package) or [])
    except metadata.PackageNotFoundError:
        return []


def tested() -> dict[str, dict[str, str]]:
    """Version by package by environment, from the files that describe them."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(shipped_folder("environments").glob("*.txt")):
        lines = (
            line.partition("==") for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
        )
        found[file.stem] = {_plain(name): version for name, _, version in lines if version}
    return found


def installed(package: str) -> str | None:
    """The installed version, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
