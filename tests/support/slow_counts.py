"""Counting that takes a while and tells where it runs, to take a machine away from it."""

import time
from pathlib import Path
from uuid import uuid4

from trustrl.tools.audit import TokenCounts


def counted_slowly(piece, arms, folder, seconds):
    """Leaves a file named after the node before it starts and another one when it is done."""
    import ray

    name = f"{ray.get_runtime_context().get_node_id()}.{uuid4().hex}"
    (Path(folder) / f"{name}.begun").touch()
    time.sleep(seconds)
    found = TokenCounts.of(piece, arms=arms)
    (Path(folder) / f"{name}.done").touch()
    return found
