"""What a run's processes know of each other."""

import ctypes
import os
import signal
import sys


def is_main_process() -> bool:
    """False on all ranks but the first of a run that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def ends_with_its_parent() -> None:
    """For `Popen(preexec_fn=)`: the child is ended when its parent is killed, which could not end it itself.

    Linux only. Elsewhere a child may outlive a killed parent, and a resumed run then finds its folder in use.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
