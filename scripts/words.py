"""Words of the documentation, page by page, and the limits that it keeps.

    python scripts/words.py    prints a table of all pages and of the removed ones; fails if a limit is exceeded

A word is what white space separates, as for `wc`, so cells and bars of tables, numbers and code count. Words between
the marks of a block that a script writes are generated, and so are pages that name their script. A page is written by
hand if most of its words are. Registrations were fixed before their study ran, and nobody edits them, so the limits do
not apply to them. Notebooks, and pages of the repository's root (CHANGELOG.md and others), are not counted.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from plain_english import REGISTERED

ROOT = Path(__file__).parents[1]
MOST_PAGES = 55
MOST_WORDS = 70_000
MOST_OF_A_STUDY = 1_500

BLOCK = re.compile(
    r"<!-- begin (?P<block>.+?) -->.*?<!-- end (?P=block) -->"
    r"|<!-- (?P<table>[\w-]+): begin.*?-->.*?<!-- (?P=table): end -->",
    re.DOTALL,
)
WRITTEN = re.compile(r"<!-- Written by `python scripts/")
APPENDIX = re.compile(r"-tables\.md$|-protocol\.md$|/registration-|/world-")
"""Registrations, protocols, tables and the description of a study's world: pages of results without a limit."""


LONGER = {"results/fault-found.md": 2_300}
"""Studies with a limit of their own: this one has two editions, one registered on the page."""


class Page(NamedTuple):
    """One page: its path in docs/, all its words, and those written by hand."""

    path: str
    words: int
    by_hand: int

    @property
    def written(self) -> str:
        """Kind of the page: by hand if most of its words are."""
        if Path(self.path).name in REGISTERED:
            return "registered"
        return "by hand" if 2 * self.by_hand > self.words else "by a script"


def count(path: str, text: str) -> Page:
    """Returns the page's numbers of words."""
    rest = "" if WRITTEN.search(text) else BLOCK.sub(" ", text)
    return Page(path, len(text.split()), len(rest.split()))


def pages(docs: Path) -> list[Page]:
    """Returns every page below a folder, by path."""
    return [count(str(file.relative_to(docs)), file.read_text(encoding="utf-8")) for file in sorted(docs.rglob("*.md"))]


def offenders(found: list[Page]) -> list[str]:
    """Returns a line for each limit that the pages exceed."""
    by_hand = sum(page.written == "by hand" for page in found)
    words = sum(page.by_hand for page in found if page.written != "registered")
    lines = [f"{by_hand} pages are written by hand, at most {MOST_PAGES} are allowed"] * (by_hand > MOST_PAGES)
    lines += [f"{words:,} words are written by hand, at most {MOST_WORDS:,} are allowed"] * (words > MOST_WORDS)
    return lines + [
        f"docs/{page.path} has {page.words:,} words, at most {most:,} are allowed: move tables to an appendix"
        for page in found
        if page.path.startswith("results/") and not APPENDIX.search(page.path)
        if page.words > (most := LONGER.get(page.path, MOST_OF_A_STUDY))
    ]


def main() -> int:
    """Prints the table and the exceeded limits, and returns the exit code."""
    found = pages(ROOT / "docs")
    print(f"{'page':<44}{'words':>8}{'by hand':>9}  written")
    for page in found:
        print(f"{page.path:<44}{page.words:>8,}{page.by_hand:>9,}  {page.written}")
    for kind in ("by hand", "by a script", "registered"):
        some = [page for page in found if page.written == kind]
        words, by_hand = (sum(counts) for counts in zip(*((page.words, page.by_hand) for page in some), strict=True))
        print(f"{f'{len(some)} pages':<44}{words:>8,}{by_hand:>9,}  {kind}")
    for old, new in tomllib.loads((ROOT / "scripts/redirects.toml").read_text(encoding="utf-8")).items():
        print(f"{old:<44}{'removed':>17}  now in {new}")
    exceeded = offenders(found)
    print(*exceeded, sep="\n", end="\n" if exceeded else "")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
