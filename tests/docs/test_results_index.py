"""The answers on the results pages agree with the verdicts of the studies that they link."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs/results"
ROW = re.compile(r"^\| [a-l] \| (.+?) \| (.+) \| \[[a-l]\]\(([\w-]+\.md)(#\S+)?\) \|$", re.M)
VERDICT = re.compile(r"<!-- begin ((?:clip )?verdict(?: [a-j])?) -->\n(.*?)<!-- end \1 -->(.{400})", re.S)
VERDICTS = {
    (page.name, name): (said, after)
    for page in RESULTS.glob("*.md")
    for name, said, after in VERDICT.findall(page.read_text())
}


def name_of(anchor):
    """The name of a verdict from the section that a row links."""
    if not anchor:
        return "verdict"
    return "clip verdict" if "clip-masks" in anchor else f"verdict {anchor[1]}"


ROWS = [
    (question, answer, (page, name_of(anchor)))
    for source in ("index.md", "first-study.md")
    for question, answer, page, anchor in ROW.findall((RESULTS / source).read_text())
]


def test_every_verdict_has_a_row():
    assert {place for *_, place in ROWS} == VERDICTS.keys()
    assert len(ROWS) == 13


@pytest.mark.parametrize(("question", "answer", "place"), ROWS, ids=["-".join(place) for *_, place in ROWS])
def test_every_number_of_an_answer_is_in_the_verdict_of_its_page(question, answer, place):
    said = "".join(VERDICTS[place])
    for number in re.findall(r"[+-]?\d+(?:\.\d+)?(?: of \d+)?%?", answer):
        assert number.rstrip("%") in said, number


@pytest.mark.parametrize("word", ["undecided", "yes", "no"])
def test_a_verdict_that_an_answer_gives_is_given_on_its_page(word):
    for _, answer, place in ROWS:
        for bold in re.findall(r"\*\*(.+?)\*\*", answer):
            if bold.rstrip(".").lower() == word:
                assert f"**{word}" in VERDICTS[place][0].lower(), place
