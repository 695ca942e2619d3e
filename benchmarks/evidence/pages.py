"""Numbers reach a page from their data, never by hand: a page marks the blocks that a command writes."""

from pathlib import Path


def fill(page: Path, name: str, text: str) -> None:
    """Replaces what lies between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: the page does not have each of the two marks once, in this order.
    """
    begin, end, old = f"<!-- begin {name} -->", f"<!-- end {name} -->", page.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{page} must have one {begin!r} followed by one {end!r}.")
    before, rest = old.split(begin)
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}")
