"""Ports of runs that share a machine."""

import os

import pytest

from trustrl.runner.processes import take_a_port


@pytest.fixture
def bare(monkeypatch):
    for name in ("MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what the test leaves behind is taken back too
        monkeypatch.delenv(name)
    return monkeypatch


def taken(environ, **given):
    for name, value in given.items():
        environ.setenv(name, value)
    take_a_port()
    return os.environ.get("MASTER_PORT")


def test_a_run_of_one_process_gets_a_port(bare):
    assert 1024 < int(taken(bare)) < 65536


def test_a_port_that_was_given_stays(bare):
    assert taken(bare, MASTER_PORT="29511") == "29511"


def test_ranks_of_a_launcher_are_left_alone(bare):
    assert taken(bare, WORLD_SIZE="2") is None
