"""Rules for all tests: our own warnings are errors unless a test expects them, a broken test file is an error, and the
tests of an engine are collected where it is installed."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

ENGINES = {
    "areal": "areal", "axolotl": "axolotl", "miles": "miles", "nemo_rl": "nemo_rl", "openrlhf": "openrlhf",
    "prime_rl": "prime_rl", "rlinf": "rlinf", "skyrl": "skyrl", "slime": "slime", "swift": "swift", "tinker": "tinker",
    "trinity": "trinity", "trl": "trl", "trl_vllm": "vllm", "unsloth": "unsloth", "verl": "verl", "verl_cpu": "verl",
    "vllm": "vllm",
}  # fmt: skip
"""Folders in tests/engines, with the package that all their tests need."""

MISSING = sorted(folder for folder, package in ENGINES.items() if find_spec(package) is None)


def pytest_ignore_collect(collection_path):
    """Leaves out a missing engine's folder, unless it is asked for by its path; then each file is skipped."""
    here = collection_path.parent == Path(__file__).parent / "engines"
    return True if here and collection_path.name in MISSING else None


def pytest_report_header():
    return [f"tests/engines/{folder}: not collected, {ENGINES[folder]} is not installed" for folder in MISSING]


def pytest_configure(config):
    """Stops if xdist would ignore groups, as 3.8 does with pytest 9.2: each worker would train what a group shares."""
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            f"pytest must be one whose groups xdist knows, got {pytest.__version__}. Install the one of engine_test in "
            "pyproject.toml."
        )


@pytest.fixture(autouse=True, scope="session")
def key_of_the_tests(tmp_path_factory):
    """Signs checkpoints of tests with a key that is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUSTRL_KEY_FILE", str(tmp_path_factory.mktemp("state") / "key"))
        yield


@pytest.fixture(autouse=True)
def our_warnings_are_errors():
    import trustrl  # here, not above: the shape checker must see the package imported first

    with warnings.catch_warnings():
        warnings.simplefilter("error", trustrl.errors.TrustRLWarning)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Begins with groups, which train or start processes: a late one would keep one worker while the other waits."""
    if getattr(config.option, "loadgroup", False):
        items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """No doctests in test files: one that cannot be imported would be a skipped doctest, and then a file without tests."""
    found = yield
    return [one for one in found if not isinstance(one, DoctestModule)]
