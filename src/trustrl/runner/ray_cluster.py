"""Waits for the nodes of a Ray cluster, which verl does not: it refuses a cluster that is smaller than its layout."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from trustrl.errors import EngineError
from trustrl.optional_imports import need

SECONDS = 600.0
"""Longest wait for the nodes."""

PAUSE_SECONDS = 2.0


def wait_for_nodes(nodes: int, log: Callable[[str], None]) -> None:
    """Waits until the cluster that RAY_ADDRESS names has so many nodes.

    Without an address, or with "local", verl starts its own cluster.
    """
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        return
    ray = need("ray", extra="verl")
    deadline = time.monotonic() + SECONDS
    said = None
    while (alive := _alive(ray)) < nodes:
        if alive != said:
            log(f"waiting for Ray's nodes: {alive} of {nodes}")
            said = alive
        if time.monotonic() > deadline:
            raise EngineError(
                f"Ray at {os.environ['RAY_ADDRESS']} must have {nodes} nodes within {SECONDS:.0f} s, got {alive}. "
                "Read the logs of `ray start` on the nodes, or set engine.nodes."
            )
        time.sleep(PAUSE_SECONDS)


def _alive(ray: Any) -> int:
    """Returns the number of nodes, or 0 if the cluster has not started."""
    # HOST:PORT, [IPv6]:PORT, ray://HOST:PORT, or a word such as "auto"
    address = urlsplit(f"//{os.environ['RAY_ADDRESS'].rpartition('//')[2]}")
    try:
        if address.port is not None:  # Ray itself would wait for minutes
            socket.create_connection((address.hostname, address.port), timeout=PAUSE_SECONDS).close()
        ray.init(log_to_driver=False, logging_level="ERROR")
        return sum(node["Alive"] for node in ray.nodes())
    except OSError:
        return 0
    finally:
        ray.shutdown()
