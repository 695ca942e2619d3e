"""Packages that each extra of trustrl installs, and their licenses.

    nox -s licenses              # resolve every extra, write docs/data/dependencies.json and the page of licenses
    nox -s licenses -- --page    # write the page again from the data, without the network

pip resolves each extra without installing it, and reports the metadata of each package. `scripts/sbom.py` makes the
release's SBOM from the same data.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/data/dependencies.json"
PAGE = ROOT / "docs/reference/licenses.md"
MARKERS = ("<!-- begin licenses -->", "<!-- end licenses -->")
CORE = "core"
"""The name that stands for an installation without extras."""

RIG = "trustrl-verl-cpu"
"""The package in packages/verl_cpu, which requires only trustrl. It is built with it and has its license."""

TORCH = "2.13.0"
"""The release that CI tests. Its licenses do not depend on the build, but NVIDIA's packages come with some builds."""

PERMISSIVE = frozenset({
    "0BSD", "Apache-2.0", "Apache-2.0-WITH-LLVM-exception", "BSD", "BSD-1-Clause", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense",
    "WTFPL", "Zlib",
})  # fmt: skip
"""Licenses that ask for a notice at most. Every other one is flagged."""

CLASSIFIERS = {
    "Apache Software License": "Apache-2.0", "BSD License": "BSD", "ISC License (ISCL)": "ISC", "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0", "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0", "The Unlicense (Unlicense)": "Unlicense",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND", "zlib/libpng License": "Zlib",
}  # fmt: skip
TEXTS = {
    "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0", "apache": "Apache-2.0",
    "apache-2.0": "Apache-2.0", "apache software license 2.0": "Apache-2.0", "bsd": "BSD", "new bsd": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause", "bsd license": "BSD", "modified bsd license": "BSD-3-Clause", "mit": "MIT",
    "mit license": "MIT", "the mit license": "MIT", "psf": "PSF-2.0", "psfl": "PSF-2.0", "isc": "ISC",
}  # fmt: skip
"""SPDX names of the words that packages use."""

REVIEWED: dict[str, tuple[str, str]] = {}
"""Licenses of packages whose metadata names none, and where we read them."""


def extras() -> dict[str, list[str]]:
    """Returns the requirements that pyproject.toml declares, by extra. Leaves out the extra of our other package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {CORE: project["dependencies"], **project["optional-dependencies"]}
    return {name: needs for name, needs in found.items() if needs != [f"{RIG}=={project['version']}"]}


def report(extra: str) -> dict[str, Any]:
    """Returns pip's report of what one extra would install."""
    wanted = str(ROOT) if extra == CORE else f"{ROOT}[{extra}]"
    with tempfile.TemporaryDirectory() as folder:
        constraints, found = Path(folder) / "torch.txt", Path(folder) / "report.json"
        constraints.write_text(f"torch=={TORCH}\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(found), "-c", str(constraints), wanted], check=True)
        return json.loads(found.read_text(encoding="utf-8"))


def license_of(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Returns a package's license and its source: its SPDX expression, its classifiers, or the text of its field."""
    if expression := metadata.get("license_expression"):
        return expression, "expression"
    named = [one.rpartition(" :: ")[2] for one in metadata.get("classifier", ()) if one.startswith("License :: ")]
    named = [CLASSIFIERS.get(one, one) for one in named if one != "OSI Approved"]
    if named:
        return " AND ".join(sorted(set(named))), "classifier"
    text = " ".join((metadata.get("license") or "").split()).strip("\"'.")
    if text.lower() in TEXTS:
        return TEXTS[text.lower()], "text"
    if canonicalize_name(metadata["name"]) in REVIEWED:
        return REVIEWED[canonicalize_name(metadata["name"])][0], "reviewed"
    return (text if 0 < len(text) <= 40 else "unknown"), "text"


def permissive(expression: str) -> bool:
    """Returns whether a license asks for a notice at most: one of the choices of OR, all the parts of AND."""
    plain = re.sub(r"[()]", " ", expression).replace(" WITH ", "-WITH-")
    if "(" in expression and " OR " in expression:
        return all(part.strip() in PERMISSIVE for part in re.split(r" AND | OR ", plain) if part.strip())
    return any(all(part.strip() in PERMISSIVE for part in one.split(" AND ")) for one in plain.split(" OR "))


def resolved(reports: Mapping[str, Mapping[str, Any]], today: date) -> dict[str, Any]:
    """Returns the data of the page and the SBOM: the packages of each extra, and each package once."""
    packages: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for extra, found in reports.items():
        items = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in found["install"]}
        keys = {name: f"{name}=={metadata['version'].partition('+')[0]}" for name, metadata in items.items()}
        needed = _needed(items, found["environment"], "" if extra == CORE else extra)
        for name, metadata in items.items():
            license_, source = license_of(metadata)
            needs = sorted(keys[one] for one in needed[name])
            if name != "trustrl":
                known = packages.setdefault(keys[name], {"license": license_, "source": source, "needs": []})
                known["needs"] = sorted({*known["needs"], *needs})
        own = keys.pop("trustrl")
        chosen[extra] = {
            "requires": extras()[extra],
            "direct": sorted(keys[one] for one in needed["trustrl"]),
            "packages": sorted(set(keys.values()) - {own}),
        }
    return {"date": today.isoformat(), "torch": TORCH, "extras": chosen, "packages": dict(sorted(packages.items()))}


def _needed(items: Mapping[str, Any], environment: Mapping[str, str], extra: str) -> dict[str, set[str]]:
    """Returns the packages that each package requires, following the extras that requirements ask for."""
    needed: dict[str, set[str]] = {name: set() for name in items}
    waiting, seen = [("trustrl", extra)], set()
    while waiting:
        name, asked = waiting.pop()
        if (name, asked) in seen or name not in items:
            continue
        seen.add((name, asked))
        for requirement in map(Requirement, items[name].get("requires_dist", ())):
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": asked}):
                continue
            needed[name].add(canonicalize_name(requirement.name))
            waiting += [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
    return {name: {one for one in found if one in items} for name, found in needed.items()}


def tables(data: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the page's generated part."""
    packages = data["packages"]
    yield f"Resolved on {data['date']} with Python 3.11 and torch {data['torch']}."
    yield ""
    yield "| extra | packages | flagged |"
    yield "|---|---|---|"
    for extra, found in data["extras"].items():
        flagged = [one for one in found["packages"] if not permissive(packages[one]["license"])]
        named = ", ".join(f"`{one.partition('==')[0]}`" for one in flagged)
        yield f"| {extra if extra == CORE else f'`{extra}`'} | {len(found['packages'])} | {named or '-'} |"
    for title, kept in (("Flagged", False), ("Permissive", True)):
        yield ""
        yield f"## {title}"
        yield ""
        yield "| package | version | license | extras |"
        yield "|---|---|---|---|"
        for key, about in packages.items():
            if permissive(about["license"]) is kept:
                name, version = key.split("==")
                users = ", ".join(extra for extra, found in data["extras"].items() if key in found["packages"])
                yield f"| `{name}` | {version} | {about['license']} | {users} |"


def page(data: Mapping[str, Any], text: str) -> str:
    """Returns the page with the tables of the data."""
    head, _, rest = text.partition(MARKERS[0])
    return "\n".join([head + MARKERS[0], *tables(data), MARKERS[1]]) + rest.partition(MARKERS[1])[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the data and the page."""
    parser = argparse.ArgumentParser(description="List the packages of every extra, and their licenses.")
    parser.add_argument("--page", action="store_true", help="Write the page again from the data.")
    if not parser.parse_args(arguments).page:
        found = resolved({extra: report(extra) for extra in extras()}, date.today())
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    PAGE.write_text(page(data, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
