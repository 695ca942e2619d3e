"""Two rules for all tests: our own warnings are errors unless a test expects them, and a broken test file is an error."""

import warnings

import pytest
from _pytest.doctest import DoctestModule


@pytest.fixture(autouse=True)
def our_warnings_are_errors():
    import trustrl  # here, not above: the shape checker must see the package imported first

    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.TrustRLWarning)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """No doctests in test files: one that cannot be imported would be a skipped doctest, and then a file without tests."""
    found = yield
    return [one for one in found if not isinstance(one, DoctestModule)]
