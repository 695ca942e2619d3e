"""verl's process groups on one machine: one backend for one device, and nobody outside is listened to."""

import functools
import os
import socket
from typing import Any

from torch import distributed

ASKED_FOR = "cpu:gloo,cpu:gloo"
"""verl asks for a backend for the CPU and one for its device. torch refuses two for the same device."""

_MARK = "trustrl_verl_cpu"


def install() -> None:
    """From now on `torch.distributed.init_process_group` understands verl. Any other call is left as it is."""
    if not hasattr(distributed.init_process_group, _MARK):
        distributed.init_process_group = _understanding(distributed.init_process_group)


def _understanding(start: Any) -> Any:
    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend != ASKED_FOR:
            return start(backend, *args, **kwargs)
        if not args and kwargs.get("init_method") is None and kwargs.get("store") is None:
            kwargs |= _loopback_store(kwargs.get("rank", -1), kwargs.get("world_size", -1))
        return start("gloo", *args, **kwargs)

    setattr(init_process_group, _MARK, True)
    return init_process_group


def _loopback_store(rank: int, world_size: int) -> dict[str, Any]:
    """A store on the loopback address, where torch's own would listen on all; none where somebody else keeps one."""
    address, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", 0))
    if address != "127.0.0.1" or rank < 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    listening: dict[str, Any] = {}
    if rank == 0:
        listening["master_listen_fd"] = socket.create_server((address, port)).detach()
    store_class: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    store = store_class(address, port, world_size, is_master=rank == 0, **listening)
    return {"store": store}
