"""The table of answers in docs/results/index.md agrees with the verdicts on the pages it links."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs/results"
ROWS = re.findall(r"^\| [a-l] \| (.+?) \| (.+) \| \[[a-l]\]\((.+?)\) \|$", (RESULTS / "index.md").read_text(), re.M)


def verdict(page):
    (found,) = re.findall(r"<!-- begin verdict -->(.*?)<!-- end verdict -->", (RESULTS / page).read_text(), re.S)
    return found


def test_every_page_with_a_verdict_has_a_row():
    pages = {page.name for page in RESULTS.glob("*.md") if "<!-- begin verdict -->" in page.read_text()}
    assert {page for _, _, page in ROWS} == pages


@pytest.mark.parametrize(("question", "answer", "page"), ROWS, ids=[page for *_, page in ROWS])
def test_every_number_of_an_answer_is_in_the_verdict_of_its_page(question, answer, page):
    said = verdict(page) + (RESULTS / page).read_text().partition("<!-- end verdict -->")[2][:400]
    for number in re.findall(r"[+-]?\d+(?:\.\d+)?(?: of \d+)?%?", answer):
        assert number.rstrip("%") in said, number


@pytest.mark.parametrize("word", ["undecided", "yes", "no"])
def test_a_verdict_that_an_answer_gives_is_given_on_its_page(word):
    for _, answer, page in ROWS:
        for bold in re.findall(r"\*\*(.+?)\*\*", answer):
            if bold.rstrip(".").lower() == word:
                assert f"**{word}" in verdict(page).lower(), page
