"""Fixtures of the tests in a browser, where playwright is installed."""

from importlib.util import find_spec

if find_spec("playwright") is not None:
    from support.report_pages import browser, opened

    __all__ = ["browser", "opened"]
