"""One rule for all tests: our own warnings are errors unless a test expects them."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def our_warnings_are_errors():
    import trustrl  # here, not above: the shape checker must see the package imported first

    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.TrustRLWarning)
        yield
