"""Generated blocks of documentation pages. A page marks the blocks, and a command fills them from data."""

import argparse
from collections.abc import Callable
from pathlib import Path


def command(about: str, **steps: Callable[[], None]) -> None:
    """Runs the step that the command line names. `about` is the script's docstring."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("what", choices=list(steps))
    steps[parser.parse_args().what]()


def fill(page: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: If the page does not have each of the two marks exactly once, in this order.
    """
    begin, end, old = f"<!-- begin {name} -->", f"<!-- end {name} -->", page.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{page} must have one {begin!r} followed by one {end!r}.")
    before, rest = old.split(begin)
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}")
