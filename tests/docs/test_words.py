"""The documentation keeps its limits of pages and words, and the count of words can fail."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("words", ROOT / "scripts/words.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


words = load()


def test_the_documentation_keeps_its_limits():
    assert words.offenders(words.pages(ROOT / "docs")) == []


def test_a_page_is_counted_without_the_blocks_that_scripts_write():
    text = (
        "# One two\n<!-- begin t -->\na b c\n<!-- end t -->\n<!-- m: begin (python x) -->\nd\n<!-- m: end -->\nthree\n"
    )
    page = words.count("guides/a.md", text)
    assert (page.words, page.by_hand) == (len(text.split()), 4)
    assert page.written == "by a script"


def test_a_registration_counts_for_no_limit():
    page = words.Page("results/k-protocol.md", 80_000, 80_000)
    assert page.written == "registered"
    assert words.offenders([page]) == []


def test_a_page_that_names_its_script_has_no_words_by_hand():
    assert words.count("a.md", "# A\n<!-- Written by `python scripts/a.py` -->\nb c\n").by_hand == 0


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        pytest.param([("a.md", 70_001, 70_001)], "70,001 words", id="words"),
        pytest.param([(f"{at}.md", 1, 1) for at in range(56)], "56 pages", id="pages"),
        pytest.param([("results/a.md", 1_501, 0)], "docs/results/a.md has 1,501 words", id="study"),
        pytest.param([("results/a-tables.md", 9_000, 0), ("a.md", 9_000, 0)], None, id="appendix"),
    ],
)
def test_each_limit_is_checked(pages, found):
    said = words.offenders([words.Page(*page) for page in pages])
    assert [line.startswith(found) for line in said] == ([True] if found else [])
