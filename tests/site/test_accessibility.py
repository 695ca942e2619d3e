"""The site for readers who need contrast, names and a keyboard: axe-core finds nothing serious, and Tab comes to all."""

import pytest

pytest.importorskip("axe_playwright_python", reason="needs `pip install axe-playwright-python`")
from support import browsing
from support.accessibility import beyond_the_keyboard, violations
from support.site_server import SIZES

PAGES = (
    "", "tour/", "algorithms/dppo/", "algorithms/troll/", "engines/verl/", "guides/choosing-a-region/", "results/",
    "guides/debugging-a-collapse/", "concepts/clip-mask-project/", "notebooks/why-the-clip-is-the-wrong-shape/",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing_serious(opened, address, size, scheme):
    tab = opened(size=size, scheme=scheme)
    found = {}
    for page in PAGES:
        tab.goto(address + page)
        found[page] = violations(tab)
    assert {page: rules for page, rules in found.items() if rules} == {}


@pytest.mark.parametrize("size", SIZES)
def test_the_keyboard_comes_to_every_control(opened, address, size):
    tab = opened(size=size)
    for page in ("", "tour/", "concepts/clip-mask-project/"):
        tab.goto(address + page)
        assert beyond_the_keyboard(tab) == [], page


def test_the_menu_and_the_search_of_a_phone_open_by_keyboard(opened):
    tab = opened(size="phone")
    for name in ("drawer", "search"):
        tab.locator(f".md-header label[for='__{name}']").first.focus()
        tab.keyboard.press("Enter")
        tab.wait_for_function(f"document.getElementById('__{name}').checked")
        tab.reload()


def test_violations_are_seen(browser):
    tab = browsing.blank_tab(browser, SIZES["laptop"])
    tab.set_content(
        "<!doctype html><html lang=en><title>t</title><main><button></button><p style='color: #aaa'>pale</p>"
    )
    assert {rule.partition(",")[0] for rule in violations(tab)} == {"button-name", "color-contrast"}
    tab.context.close()
