"""The built site, served, and pages of it in a real browser."""

from pathlib import Path

import pytest

from support.site_server import SIZES, served

SITE = Path(__file__).parents[2] / "build" / "site"


@pytest.fixture(scope="session")
def address():
    if not (SITE / "index.html").is_file():
        pytest.skip("needs the built site: `nox -s docs`")
    with served(SITE) as where:
        yield where


@pytest.fixture(scope="session")
def browser():
    pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
    from support import browsing

    if browsing.CHROMIUM is None:
        pytest.skip("needs Chromium: `apt-get install chromium`")
    with browsing.started() as found:
        yield found


@pytest.fixture
def opened(address, browser):
    """Opens pages; afterwards nothing may have gone wrong, and no other host may have been asked."""
    from support import browsing

    contexts, wrong, requests = [], [], []

    def open_(page="", size="laptop", scheme="light"):
        tab = browsing.blank_tab(browser, SIZES[size], scheme)
        contexts.append(tab.context)
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        assert tab.goto(address + page).ok, page
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
    assert requests
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
