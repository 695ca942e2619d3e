"""Every removed address of the site leads to a page and a section that exist."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REDIRECTS = tomllib.loads((ROOT / "scripts/redirects.toml").read_text())


def anchors(page):
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("old", REDIRECTS)
def test_a_removed_address_leads_to_a_section_that_exists(old):
    place, _, section = REDIRECTS[old].partition("#")
    assert not (ROOT / "docs" / old).exists()
    page = ROOT / "docs" / place
    assert page.is_file()
    assert not section or section in anchors(page)
