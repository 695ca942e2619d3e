"""Processes of a run: their rank, their rendezvous port, their lifetime, and the progress the first one shows."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from trustrl.world.progress import ProgressDisplay

SHOWN = {
    "reward": "reward", "trustrl/masked_share": "masked", "trustrl/projected_share": "projected",
    "trustrl/entropy": "entropy", "entropy": "entropy",
}  # fmt: skip


class Progress(ProgressDisplay):
    """Progress of a training run, with the main metrics of each step."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Shows a completed step with the metrics in `row`."""
        shown = {
            word: f"{word} {row[name]:.3f}" for name, word in SHOWN.items() if isinstance(row.get(name), (int, float))
        }
        self.update(row["step"], ", ".join(shown.values()))


def is_main_process() -> bool:
    """Returns True unless a launcher started this process with a rank other than 0."""
    return int(os.environ.get("RANK", "0")) == 0


def take_a_port() -> None:
    """Chooses a free rendezvous port for a run of one process. Launchers choose one for their ranks.

    Engines default to one fixed port, so the second of two runs on a machine would find it in use.
    """
    if "MASTER_PORT" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def ends_with_its_parent() -> None:
    """Makes the kernel terminate this child if its parent is killed. Pass it to `Popen(preexec_fn=)`.

    Linux only. On other systems a child may outlive a killed parent, and a resumed run then finds its directory in use.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
