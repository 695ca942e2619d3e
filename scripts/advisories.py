"""Known vulnerabilities of the pinned packages, from the OSV database.

    nox -s advisories                              # ask api.osv.dev about every pin
    nox -s advisories -- --database PyPI.zip       # without the network, from OSV's export of all PyPI advisories
    nox -s advisories -- trl verl                  # only these files

The export is https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip. A mirror that answers every question with
"nothing known" would look like good news, so the tool also asks about a release that is known to be vulnerable.

Exit codes: 0 if nothing is known, 1 if an advisory applies, 3 if the database cannot be had or does not answer.
"""

import argparse
import json
import sys
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environment_hashes import pin_files, pins
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

SERVICE = "https://api.osv.dev/v1/querybatch"
CANARY = ("jinja2", "2.4.1")
"""A release with published advisories since 2014. A database that knows none of them is not one."""

BATCH = 500
CLEAN, FOUND, UNKNOWN = 0, 1, 3
IGNORED: dict[str, str] = {}
"""Advisories that do not concern us, by id, with the reason."""

Pin = tuple[str, str]


class NoDatabaseError(Exception):
    """The advisories cannot be had."""


def ask(asked: Sequence[Pin]) -> dict[Pin, set[str]]:
    """Returns the ids of the advisories of each release, from OSV's service.

    Raises:
        NoDatabaseError: If the service cannot be reached or does not answer as documented.
    """
    found: dict[Pin, set[str]] = {}
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        queries = [{"package": {"ecosystem": "PyPI", "name": name}, "version": version} for name, version in part]
        body = json.dumps({"queries": queries}).encode()
        request = urllib.request.Request(SERVICE, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                results = json.load(answer)["results"]
            found |= {
                pin: {one["id"] for one in result.get("vulns", ())} for pin, result in zip(part, results, strict=True)
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoDatabaseError(f"{SERVICE} did not answer ({error})") from error
    return found


def look_up(asked: Sequence[Pin], database: Path) -> dict[Pin, set[str]]:
    """Returns the same from an export: a zip file with one JSON file for each advisory.

    Raises:
        NoDatabaseError: If the file cannot be read as such an export.
    """
    found: dict[Pin, set[str]] = {pin: set() for pin in asked}
    wanted: dict[str, list[Pin]] = {}
    for pin in asked:
        wanted.setdefault(pin[0], []).append(pin)
    try:
        with zipfile.ZipFile(database) as archive:
            for name in archive.namelist():
                advisory = json.loads(archive.read(name))
                for affected in () if advisory.get("withdrawn") else advisory.get("affected", ()):
                    package = affected.get("package", {})
                    if package.get("ecosystem") == "PyPI":
                        for pin in wanted.get(canonicalize_name(package["name"]), ()):
                            if applies(affected, pin[1]):
                                found[pin].add(advisory["id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise NoDatabaseError(f"{database} is not an export of OSV's advisories ({error})") from error
    return found


def applies(affected: Mapping[str, Any], version: str) -> bool:
    """Returns whether a version is listed, or lies in a range of versions, of OSV's `affected`."""
    if version in affected.get("versions", ()):
        return True
    for one in affected.get("ranges", ()):
        if one.get("type") == "ECOSYSTEM" and _inside(one["events"], Version(version)):
            return True
    return False


def _inside(events: Sequence[Mapping[str, str]], version: Version) -> bool:
    inside = False
    for event in sorted(events, key=lambda event: _version(next(iter(event.values())))):
        ((kind, at),) = event.items()
        if kind == "introduced" and version >= _version(at):
            inside = True
        elif (kind == "fixed" and version >= _version(at)) or (kind == "last_affected" and version > _version(at)):
            inside = False
    return inside


def _version(text: str) -> Version:
    """Returns the version of an event. OSV's 0 stands for the beginning."""
    try:
        return Version("0.dev0" if text == "0" else text)
    except InvalidVersion as error:
        raise NoDatabaseError(f"{text!r} is not a version") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the pins, prints one line for each advisory, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Look up known vulnerabilities of the pinned packages.")
    parser.add_argument("names", nargs="*", help="Names of files of pins. Default: all.")
    parser.add_argument("--database", type=Path, help="OSV's export of PyPI advisories, instead of its service.")
    chosen = parser.parse_args(arguments)
    try:
        files = pin_files(chosen.names)
    except ValueError as error:
        parser.error(str(error))
    users: dict[Pin, list[str]] = {}
    for file in files:
        for name, version, _ in pins(file.read_text(encoding="utf-8")):
            users.setdefault((canonicalize_name(name), version), []).append(file.stem)
    asked = [*users, *({CANARY} - users.keys())]
    try:
        known = look_up(asked, chosen.database) if chosen.database else ask(asked)
        if not known[CANARY]:
            raise NoDatabaseError(f"it knows no advisory of {'=='.join(CANARY)}, which has some")
    except NoDatabaseError as error:
        print(
            f"NOT CHECKED: no database of advisories: {error}. {len(users)} releases were not checked.", file=sys.stderr
        )
        print("hint: download OSV's export elsewhere and pass it with --database.", file=sys.stderr)
        return UNKNOWN
    hits = [(pin, sorted(known[pin] - IGNORED.keys())) for pin in users if known[pin] - IGNORED.keys()]
    for (name, version), ids in hits:
        print(f"{name}=={version}: {', '.join(ids)} (in {', '.join(users[name, version])})")
    print(f"{len(users)} releases checked, {len(hits)} with known advisories", file=sys.stderr)
    return FOUND if hits else CLEAN


if __name__ == "__main__":
    sys.exit(main())
