"""Equations in a real browser: KaTeX reads every line, and no line is cut on a phone."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    file.relative_to(DOCS).with_suffix("").as_posix().removesuffix("index") + "/"
    for file in DOCS.glob("**/*.md")
    if "```math" in file.read_text()
)


@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_katex_reads_every_equation_and_no_line_is_cut(opened, size):
    assert {"algorithms/dppo/", "algorithms/troll/", "algorithms/cispo/", "concepts/reductions/"} <= set(PAGES)
    tab = opened("algorithms/dppo/", size)
    for page in PAGES:
        tab.goto(tab.url.partition("algorithms/")[0].partition("concepts/")[0] + page)
        tab.evaluate("document.fonts.ready.then(() => null)")
        source = (DOCS / f"{page.rstrip('/')}.md").read_text()
        assert tab.locator(".equation .katex").count() == source.count("```math"), page
        assert tab.locator(".katex-error").count() == 0, page
        assert not tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"), page
        boxes = "[...document.querySelectorAll('.equation')]"
        cut = tab.evaluate(f"{boxes}.filter((box) => box.scrollHeight > box.clientHeight + 1).length")
        unmarked = tab.evaluate(
            f"{boxes}.filter((box) => (box.scrollWidth > box.clientWidth) != (box.tabIndex == 0)).length"
        )
        assert (cut, unmarked) == (0, 0), page
        if size == "laptop" or page in ("algorithms/dppo/", "algorithms/troll/", "algorithms/ppo/"):
            assert tab.locator(".equation.scrolls").count() == 0, page


def test_a_circumflex_stands_over_the_letter_that_it_belongs_to(opened):
    tab = opened("algorithms/troll/")
    accents = tab.locator(".equation .katex-html .katex-accent")
    assert accents.count() >= 6
    for accent in accents.all():
        assert "π" in accent.text_content()
        letter, hat = (accent.locator(part).last.bounding_box() for part in (".mathnormal", ".accent-body"))
        middle = hat["x"] + hat["width"] / 2
        assert letter["x"] <= middle <= letter["x"] + letter["width"] + 2


def test_pages_without_equations_do_not_load_katex(opened):
    tab = opened("guides/choosing-a-region/")
    assert tab.locator("script[src*=katex]").count() == 0
