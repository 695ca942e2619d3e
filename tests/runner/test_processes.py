"""Ports of runs that share a machine, and addresses of clusters."""

import os
import socket
from types import SimpleNamespace

import pytest

from trustrl.runner import ray_cluster
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


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "[::1]:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_is_reached_by_every_form_of_its_address(form, monkeypatch):
    """A host such as `ray://head` does not exist, so the nodes were waited for in vain."""
    family = socket.AF_INET6 if "[" in form else socket.AF_INET
    ray = SimpleNamespace(init=lambda **_: None, nodes=lambda: [{"Alive": True}], shutdown=lambda: None)
    monkeypatch.setattr(ray_cluster, "need", lambda *_, **__: ray)
    monkeypatch.setattr(ray_cluster, "SECONDS", 0.0)
    with socket.socket(family) as head:
        try:
            head.bind(("::1" if "[" in form else "127.0.0.1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        head.listen()
        monkeypatch.setenv("RAY_ADDRESS", form.format(head.getsockname()[1]))
        ray_cluster.wait_for_nodes(1, pytest.fail)
