"""Hashes of the pinned packages in `environments` and `.github/locks`: every file of each release, for all platforms.

    nox -s hashes                # ask the package index, and write the hashes of all files
    nox -s hashes -- --check     # write nothing, fail if the index lists other files than are written here
    nox -s hashes -- trl verl    # only these files

The sessions of nox and the workflows install these files with `pip install --require-hashes`, so pip refuses a file
that was not there when the hashes were written. A release that gained files since is reported by `--check`, and still
installs.
"""

import argparse
import json
import os
import re
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "environments", ROOT / ".github" / "locks")
INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")

Listing = dict[str, str]
"""SHA-256 of each file of a project, by file name."""


class _Links(HTMLParser):
    """Collects the files and hashes of a page of the simple index."""

    def __init__(self) -> None:
        super().__init__()
        self.files: Listing = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Reads one link."""
        address, _, digest = (dict(attrs).get("href") or "").partition("#sha256=")
        if tag == "a" and digest:
            self.files[address.rpartition("/")[2]] = digest


def listing(name: str, index: str) -> Listing:
    """Returns every file of a project that the index lists with a hash, from its JSON or its HTML."""
    address = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept": ACCEPT}), timeout=120) as answer:
        content, body = answer.headers.get_content_type(), answer.read().decode()
    if content.endswith("json"):
        return {one["filename"]: one["hashes"]["sha256"] for one in json.loads(body)["files"] if one["hashes"]}
    page = _Links()
    page.feed(body)
    return page.files


def hashes(files: Listing, version: str) -> list[str]:
    """Returns the sorted hashes of one release's wheels and source archives."""
    wanted = Version(version)
    return sorted({digest for file, digest in files.items() if _version(file) == wanted})


def _version(file: str) -> Version | None:
    """Returns the version in a file's name. Old formats such as `.egg` have none that pip would install."""
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def pins(text: str) -> list[tuple[str, str, list[str]]]:
    """Returns name, version and hashes of each pin of a requirements file."""
    found: list[tuple[str, str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if match := PIN.match(line):
            found.append((match["name"], match["version"], HASH.findall(line)))
    return found


def pin_files(names: Sequence[str] = ()) -> list[Path]:
    """Returns the files with these names, or all of them.

    Raises:
        ValueError: If there is no such file.
    """
    files = {file.stem: file for folder in FOLDERS for file in sorted(folder.glob("*.txt"))}
    if unknown := sorted(set(names) - set(files)):
        raise ValueError(f"names must be of {', '.join(files)}, got {', '.join(unknown)}.")
    return [files[name] for name in names or files]


def rewritten(text: str, hashes_of: Callable[[str, str], Iterable[str]]) -> str:
    """Returns the requirements file with new hashes. Comments and the order of the pins stay."""
    lines: list[str] = []
    for line in re.sub(r" *\\\n *--hash=\S+", "", text).splitlines():
        match = PIN.match(line)
        digests = hashes_of(match["name"], match["version"]) if match else ()
        lines.append(" \\\n    ".join([line, *(f"--hash=sha256:{one}" for one in digests)]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the hashes.

    Returns:
        0; or 1 if the index lacks a release, or if `--check` found a difference.
    """
    parser = argparse.ArgumentParser(description="Write the hashes of all files of the pinned packages.")
    parser.add_argument("names", nargs="*", help="Names of files. Default: all.")
    parser.add_argument("--check", action="store_true", help="Compare instead of writing.")
    parser.add_argument("--index", default=os.environ.get("PIP_INDEX_URL", INDEX), help="Address of the simple index.")
    chosen = parser.parse_args(arguments)
    try:
        files = pin_files(chosen.names)
    except ValueError as error:
        parser.error(str(error))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    names = sorted({name for text in texts.values() for name, *_ in pins(text)})
    with ThreadPoolExecutor(8) as pool:
        listed = dict(zip(names, pool.map(lambda name: listing(name, chosen.index), names), strict=True))
    missing = sorted(
        {f"{n}=={v}" for text in texts.values() for n, v, _ in pins(text) if not hashes(listed[n], v)}
    )  # fmt: skip
    if missing:
        print(f"error: {chosen.index} lists no file with a hash for {', '.join(missing)}.", file=sys.stderr)
        return 1
    new = {file: rewritten(text, lambda name, version: hashes(listed[name], version)) for file, text in texts.items()}
    changed = [file for file in files if new[file] != texts[file]]
    if not chosen.check:
        for file in changed:
            file.write_text(new[file], encoding="utf-8")
    total = sum(len(found) for text in new.values() for *_, found in pins(text))
    print(f"{len(names)} projects, {total} hashes in {len(files)} files; differs: {[f.name for f in changed]}")
    return 1 if chosen.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
