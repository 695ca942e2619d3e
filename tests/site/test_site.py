"""The built site in a real browser: every page opens, asks no other host, fits a laptop and a phone, and can be searched."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

from support.site_server import KINDS, SIZES

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"

SOURCES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]
WRITTEN = sorted(file.relative_to(ROOT / "docs").with_suffix("").as_posix() for file in SOURCES)
PAGES = [f"{name.removesuffix('index')}/".lstrip("/").replace("//", "/") for name in WRITTEN] + [
    "project/contributing/", "project/changelog/", "project/security/", "project/code-of-conduct/",
]  # fmt: skip


class Fetched(HTMLParser):
    """What a page loads by itself, and its first-level headings."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.headings = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.headings += tag == "h1"
        if tag in ("img", "script", "iframe", "source") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found["href"])


def test_every_page_is_served_with_one_title_and_loads_only_what_the_site_has(address):
    for page in PAGES:
        with urlopen(address + page) as answer:
            fetched = Fetched(answer.read().decode())
        assert fetched.headings == 1, page
        for url in {urljoin(address + page, one) for one in fetched.loads}:
            assert url.startswith(address), (page, url)
            assert (SITE / url.removeprefix(address).partition("?")[0]).is_file(), (page, url)


@pytest.mark.parametrize("size", SIZES)
def test_a_page_of_each_kind_shows_its_pictures_and_nothing_sticks_out(opened, address, size):
    tab = opened(size=size)
    too_wide, broken = [], []
    for page in KINDS:
        tab.goto(address + page)
        if not tab.evaluate("[...document.images].every((one) => one.complete && one.naturalWidth > 0)"):
            broken.append(page)
        if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            too_wide.append(page)
    assert too_wide == []
    assert broken == []


def test_the_navigation_leads_to_every_page_that_is_not_left_out_of_it(opened, address):
    left_out = re.search(r"^not_in_nav: .*\n((?: +/.+\.md\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)[1].split()
    assert len(left_out) == 2
    tab = opened()
    links = tab.locator("nav.md-nav--primary a.md-nav__link, nav.md-nav--primary label ~ a").all()
    led_to = {urljoin(address, link.get_attribute("href")) for link in links}
    missing = {address + page for page in PAGES} - led_to
    assert missing == {address + page.strip("/").replace(".md", "/") for page in left_out}


def test_the_search_finds_troll(opened):
    tab = opened()
    tab.locator("input.md-search__input").click()
    tab.keyboard.type("TROLL")
    found = tab.locator(".md-search-result__item a.md-search-result__link")
    found.first.wait_for(state="visible")
    assert any("algorithms/troll/" in one.get_attribute("href") for one in found.all())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system(opened, scheme):
    tab = opened(scheme=scheme)
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (float(part) for part in background.split("(")[1].rstrip(")").split(",")[:3])
    assert (red + green + blue < 300) == (scheme == "dark")


def test_the_reference_shows_signatures_fields_and_examples(opened):
    tab = opened("reference/api/")
    assert "reduction: Reduction" in tab.locator(".doc-signature").first.text_content()
    assert tab.locator("[id='trustrl.RolloutTokens.behavior_logp']").count() == 1
    assert tab.locator("article .highlight", has_text=">>> policy_loss(").count() == 1
