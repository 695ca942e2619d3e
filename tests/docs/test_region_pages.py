"""The pages of docs/algorithms are what the files of the regions say."""

import re
from dataclasses import fields

import pytest
import region_pages

from trustrl.regions import catalogue, classes

PAGES = region_pages.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_from_the_region(name):
    assert PAGES[name] == (region_pages.FOLDER / name).read_text(), "Run `python scripts/region_pages.py`."


def test_the_other_pages_are_written_by_hand():
    others = {page.stem for page in region_pages.FOLDER.glob("*.md")} - {name.removesuffix(".md") for name in PAGES}
    assert others == set(region_pages.BY_HAND)
    assert {f"{name}.md" for name in region_pages.MEASURED} <= set(PAGES)


@pytest.mark.parametrize("region", [region for module in catalogue() for region in classes(module)])
def test_every_setting_of_a_region_has_a_docstring(region):
    own = {field.name for field in fields(region)} - region_pages.SHARED
    assert own <= set(region_pages.documented(region))


@pytest.mark.parametrize("name", sorted(set(PAGES) - {"index.md"}))
def test_a_page_has_the_effect_the_equation_the_settings_and_the_source(name):
    text = PAGES[name]
    assert re.search(r"^```math\n.*\n& .*=", text, re.M)
    assert re.findall(r"^## (Settings|Reference)$", text, re.M) == ["Settings", "Reference"]
    assert "- **Results**: " in text
