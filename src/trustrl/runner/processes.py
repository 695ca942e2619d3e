"""What a run's processes know of each other."""

import ctypes
import os
import signal
import socket
import sys


def is_main_process() -> bool:
    """False on all ranks but the first of a run that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def take_a_port() -> None:
    """Gives a run of one process a rendezvous of its own; a launcher has given its ranks theirs.

    Engines fall back on one fixed port, and the second of two runs on a machine finds it in use.
    """
    if "MASTER_PORT" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def ends_with_its_parent() -> None:
    """For `Popen(preexec_fn=)`: the child is ended when its parent is killed, which could not end it itself.

    Linux only. Elsewhere a child may outlive a killed parent, and a resumed run then finds its folder in use.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
