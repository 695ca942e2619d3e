"""verl's process groups on a CPU, as the plugin starts them: where they listen, whatever the machine is called."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

pytest.importorskip("verl")

START = """
import os, sys
from support.sockets import listening
before = listening()
from torch import distributed
from trustrl_verl_cpu import plugin
distributed.init_process_group(plugin.TWO_BACKENDS, rank=0, world_size=1)
opened = listening() - before
assert len(opened) >= 2, opened  # the store and gloo
print(*(host for host, _ in opened))
"""
RENAMED = ["unshare", "--user", "--map-root-user", "--uts"]


def started(*prefix):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VERL_PLATFORM": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    environment.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run([*prefix, sys.executable, "-c", START], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return set(done.stdout.split())


def test_store_and_group_listen_on_loopback_whatever_the_machine_is_called():
    """Where it can be done, the machine is called by an address that others reach, which gloo would take."""
    can = shutil.which("unshare") and not subprocess.run([*RENAMED, "hostname", "x"], capture_output=True).returncode
    named = [*RENAMED, "sh", "-c", 'hostname "$0" && exec "$@"', own_address()] if can else []
    assert started(*named) == {"127.0.0.1"}


def own_address():
    """An address of this machine that others can reach; loopback if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.7", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
