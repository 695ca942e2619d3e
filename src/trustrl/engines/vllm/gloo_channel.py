"""Gloo channel that broadcasts tensors in order from one sender, independent of other process groups.

The sender listens only on its own address (torch's own store would listen on every interface), announces the port, and
waits until all receivers have joined. A side that waits too long raises an error that names the other side and the
timeout.

Neither gloo nor torch's store authenticates a peer, so both sides refuse every address but loopback. The environment
variable `OVER_NETWORK` of a process lifts this for that process.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor

from trustrl.errors import ConfigError, EngineError

dist: Any = import_module("torch.distributed")  # its stubs lack stores and gloo's options

OVER_NETWORK = "TRUSTRL_WEIGHTS_OVER_NETWORK"
"""Environment variable that must be 1 for an address that other machines can reach."""


class Listener:
    """Rank 0's store, which receivers join.

    Args:
        address: The address to listen on.
        port: The port; 0 chooses a free one.
        num_receivers: The number of receivers.
        timeout_seconds: How long to wait for them.

    Raises:
        ConfigError: If other machines can reach the address, and `OVER_NETWORK` is not set.
        EngineError: If the address cannot be listened on.
    """

    def __init__(self, address: str, port: int, *, num_receivers: int, timeout_seconds: float) -> None:
        require_loopback(address)
        try:
            server = socket.create_server((address, port), family=_family(address))
        except OSError as error:
            raise EngineError(
                f"{address}:{port} must be a free address of this machine, and listening on it failed ({error}). "
                "Use port 0 for a free port, and the address at which the sampler reaches this machine."
            ) from error
        self.address, self.port, self.world_size = address, server.getsockname()[1], num_receivers + 1
        self._timeout = timeout_seconds
        self._store = dist.TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=server.detach(),
        )  # fmt: skip

    def accept(self, while_waiting: Callable[[], None]) -> "Channel":
        """Waits for every receiver, and returns the channel.

        Args:
            while_waiting: Called repeatedly; may raise to stop waiting.

        Raises:
            EngineError: If a receiver does not join in time.
        """
        expected = [_joined(rank) for rank in range(1, self.world_size)]
        deadline = time.monotonic() + self._timeout
        while not self._store.check(expected):
            while_waiting()
            if time.monotonic() > deadline:
                here = sum(self._store.check([key]) for key in expected)
                raise EngineError(
                    f"All {len(expected)} of the sampler's workers must join {self.address}:{self.port} within "
                    f"{self._timeout:g} s, got {here}. Check num_workers, and that the sampler reaches this address."
                )
            time.sleep(0.01)
        return Channel(self._store, 0, self.world_size, self.address, self._timeout)


class Channel:
    """An open connection, on which rank 0 sends."""

    def __init__(self, store: Any, rank: int, world_size: int, address: str, timeout_seconds: float) -> None:
        self._store = store  # on rank 0 it is the server, which must live as long as the group
        self._waited = f"within {timeout_seconds:g} s"
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        # Between machines gloo finds an interface (set GLOO_SOCKET_IFNAME to choose). On one machine it uses loopback.
        make = dist.ProcessGroupGloo
        options._devices = [
            make.create_device(hostname=address) if _loopback(address) else make.create_default_device()
        ]
        with self._readable("join"):
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)

    @classmethod
    def join(cls, address: str, port: int, *, rank: int, world_size: int, timeout_seconds: float) -> Self:
        """Joins as a receiver.

        Raises:
            ConfigError: If the address is on another machine, and `OVER_NETWORK` is not set.
            EngineError: If the trainer does not listen there.
        """
        require_loopback(address)
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
        except dist.DistError as error:
            raise EngineError(
                f"The trainer did not answer on {address}:{port} within {timeout_seconds:g} s. "
                "Set the address to an address of the trainer that the sampler's machine can reach."
            ) from error
        store.set(_joined(rank), "1")
        return cls(store, rank, world_size, address, timeout_seconds)

    def send(self, tensor: Tensor) -> None:
        """Sends a tensor to every receiver."""
        self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Receives the next tensor, on the CPU."""
        tensor = torch.empty(shape, dtype=dtype)
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        raw = tensor.reshape(-1).view(torch.uint8)  # bytes, because gloo does not support every dtype
        if raw.numel():
            with self._readable("keep up"):
                self._group.broadcast([raw], dist.BroadcastOptions()).wait()

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(
                f"Every side of a weight transfer must {what} {self._waited}, and one did not ({error}). "
                "Check the other process's log. A longer timeout_seconds helps only if the other process was slow."
            ) from error


def require_loopback(address: str) -> None:
    """Raises if weights would leave this machine, or be open to others, without the user's permission.

    Raises:
        ConfigError: If the address is not loopback, and `OVER_NETWORK` is not set to 1.
    """
    if os.environ.get(OVER_NETWORK) == "1" or _loopback(address):
        return
    raise ConfigError(
        f"address must be a loopback address such as 127.0.0.1, got {address!r}. The channel does not authenticate its "
        "peers: any machine that reaches it can read or replace the weights. If you trust all of them, set "
        f"{OVER_NETWORK}=1 in the environments of the trainer and of the sampler."
    )


def _loopback(address: str) -> bool:
    """Returns whether every address that a name stands for is loopback. An empty name would mean every interface."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(address, None)} if address else set()
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in addresses)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _joined(rank: int) -> str:
    return f"joined/{rank}"
