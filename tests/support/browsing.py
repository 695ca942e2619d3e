"""Chromium through playwright, for tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PATIENCE = 240_000
"""Milliseconds: the machine may be busy with something else."""


@contextmanager
def started() -> Iterator[Browser]:
    """The browser, until the end of the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


def blank_tab(browser: Browser, size: tuple[int, int], scheme: str = "light") -> Page:
    """A tab in a context of its own."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    return context.new_page()
