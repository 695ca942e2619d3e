"""A Ray cluster that was started elsewhere: it is waited for, and verl on a CPU joins it with its own variables."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from trustrl.errors import EngineError
from trustrl.runner import ray_cluster
from trustrl_verl_cpu.cpu_defaults import with_defaults


def test_without_an_address_nothing_is_waited_for(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_cluster.wait_for_nodes(1_000, pytest.fail)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    ray_cluster.wait_for_nodes(1_000, pytest.fail)


def test_nodes_are_waited_for(monkeypatch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_cluster, "SECONDS", 3.0)
    log = []
    with pytest.raises(EngineError, match=rf"Ray at {address} must have 1 nodes within 3 s, got 0"):
        ray_cluster.wait_for_nodes(1, log.append)
    head = subprocess.Popen(
        [
            Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={address.split(':')[1]}",
            "--node-ip-address=127.0.0.1", "--num-cpus=1", "--include-dashboard=false", "--object-store-memory=100000000",
        ],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        monkeypatch.setattr(ray_cluster, "SECONDS", 120.0)
        ray_cluster.wait_for_nodes(1, log.append)
        monkeypatch.setattr(ray_cluster, "SECONDS", 1.0)
        with pytest.raises(EngineError, match="must have 2 nodes within 1 s, got 1"):
            ray_cluster.wait_for_nodes(2, log.append)
    finally:
        head.terminate()
        head.wait(60)
    assert log == ["waiting for Ray's nodes: 0 of 1"] * 2 + ["waiting for Ray's nodes: 1 of 2"]


def test_verl_joins_a_cluster_with_the_variables_of_a_cpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = with_defaults([])
    assert "+ray_kwargs.ray_init.address=local" in alone
    monkeypatch.setenv("RAY_ADDRESS", "local")  # Ray's word for a new cluster
    assert with_defaults([]) == alone
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    joined = with_defaults([])
    start = "+ray_kwargs.ray_init.runtime_env.env_vars."
    assert {argument for argument in joined if "ray_init" in argument} == {
        f"{start}VERL_PLATFORM='cpu'", f"{start}OMP_NUM_THREADS='1'", f"{start}TOKENIZERS_PARALLELISM='false'",
    }  # fmt: skip
    assert {argument for argument in alone if "ray_init" not in argument} == set(joined) - {
        argument for argument in joined if "ray_init" in argument
    }
