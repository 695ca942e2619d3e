"""Where the channel for weights listens, on real stores and process groups; it needs torch and no vLLM."""

import socket
import sys
import threading

import pytest

from support.sockets import listening
from trustrl.engines.vllm.gloo_channel import OVER_NETWORK, Channel, Listener, require_loopback
from trustrl.errors import ConfigError, EngineError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def no_permission(monkeypatch):
    monkeypatch.delenv(OVER_NETWORK, raising=False)


def pair(address):
    """Both ends of a channel, in this process."""
    listener = Listener(address, 0, num_receivers=1, timeout_seconds=10.0)
    ends = []
    join = lambda: ends.append(Channel.join(address, listener.port, rank=1, world_size=2, timeout_seconds=10.0))  # noqa: E731
    thread = threading.Thread(target=join)
    thread.start()
    ends.insert(0, listener.accept(lambda: None))
    thread.join()
    return listener, ends


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.1.1", "::1"])
def test_store_and_process_group_listen_on_loopback_alone(address):
    before = listening()
    listener, ends = pair(address)
    opened = listening() - before
    assert len(ends) == 2
    assert listener.port in {port for _, port in opened}
    assert len(opened) >= 3  # the store, and gloo's two ends
    assert all(host.is_loopback for host, _ in opened), opened


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "192.0.2.7", "no-such-name.invalid", "::ffff:192.0.2.7"])
def test_other_addresses_are_refused_by_both_sides_before_a_socket_is_opened(address, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "create_server", opened)
    monkeypatch.setattr("trustrl.engines.vllm.gloo_channel.dist.TCPStore", opened)
    with pytest.raises(ConfigError, match="address must be a loopback address"):
        Listener(address, 0, num_receivers=1, timeout_seconds=1.0)
    with pytest.raises(ConfigError, match=f"set {OVER_NETWORK}=1"):
        Channel.join(address, 1, rank=1, world_size=2, timeout_seconds=1.0)


def test_a_name_that_also_stands_for_another_machine_is_refused(monkeypatch):
    both = [(0, 0, 0, "", ("127.0.0.1", 0)), (0, 0, 0, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: both)
    with pytest.raises(ConfigError, match="got 'two-faced'"):
        require_loopback("two-faced")


def test_the_network_is_used_if_the_user_asks_for_it(monkeypatch):
    monkeypatch.setenv(OVER_NETWORK, "1")
    with pytest.raises(EngineError, match="must be a free address of this machine"):
        Listener("192.0.2.7", 0, num_receivers=1, timeout_seconds=1.0)  # reserved for documentation: nobody has it
    monkeypatch.setenv(OVER_NETWORK, "yes")
    with pytest.raises(ConfigError):
        require_loopback("192.0.2.7")
