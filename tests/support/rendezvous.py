"""A rendezvous of one's own: TRL tries the same four ports in every process, so that two tests can pick one port."""

import os
import socket
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python_path():
    """Returns a PYTHONPATH with which a child process imports `support`, and whatever it would import without."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(TESTS), *filter(None, inherited)])


def own_environment(without=(), **more):
    """This process's environment for a child: nothing of an engine that lives here, and a port nobody else has."""
    inherited = {name: value for name, value in os.environ.items() if name not in {*NAMES, *without}}
    return {**inherited, "MASTER_PORT": str(free_port()), **more}
