"""Fixtures of the kernels' tests."""

import pytest

from support.device_counts import as_on_an_accelerator


@pytest.fixture(params=["cpu", "accelerator"])
def both_ways(request):
    """Runs a test twice: with the shortcuts that a CPU may take, and as on a device whose values are not read."""
    if request.param == "cpu":
        yield
    else:
        with as_on_an_accelerator():
            yield
