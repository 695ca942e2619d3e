"""One trainer of ms-swift, made as `swift rlhf` makes it, for all tests of a session."""

import pytest

pytest.importorskip("swift")

from support import swift_world as world


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """Arguments of a run that works with a region."""
    return world.write(tmp_path_factory.mktemp("swift"))


@pytest.fixture
def chosen(monkeypatch):
    """Sets the variables of a region."""

    def choose(region="dppo-binary-tv", behavior="trainer", **more):
        for name, value in {"REGION": region, "BEHAVIOR": behavior, **more}.items():
            monkeypatch.setenv(f"TRUSTRL_{name}", value)

    choose()
    return choose
