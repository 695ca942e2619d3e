"""Settings in the environment that open a door or starve a run. Values are never shown."""

import os
from collections.abc import Mapping
from pathlib import Path

from trustrl.doctor.findings import Finding

OFF = ("", "0", "false", "no", "off")
UNSAFE = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (
        "vLLM then unpickles what it is sent, and a pickle can run any code.",
        "Unset it unless the server is on loopback and you need it for weights.",
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": (
        "Whoever reaches the server can make it load adapters from paths of their choice.",
        "Unset it unless the server is on loopback.",
    ),
    "VLLM_SERVER_DEV_MODE": (
        "The server opens routes that change weights, put it to sleep and reset it.",
        "trustrl's weight sync needs it: then bind the server to 127.0.0.1. Unset it otherwise.",
    ),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": (
        "torch.load then unpickles whole checkpoints, and a pickle can run any code.",
        "Unset it, and load only what you made.",
    ),
    "HF_DATASETS_TRUST_REMOTE_CODE": (
        "Older versions of datasets then run code that comes with a dataset.",
        "Unset it; use datasets in Parquet.",
    ),
}
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")


def check(environment: Mapping[str, str] | None = None, cpus: int | None = None) -> list[Finding]:
    """Insecure settings, secrets that children inherit, and threads."""
    given = os.environ if environment is None else environment
    return [*_unsafe(given), *_secrets(given), *_threads(given, cpus or usable_cpus())]


def _unsafe(given: Mapping[str, str]) -> list[Finding]:
    found = [
        Finding("warning", f"{name} is set", why, do)
        for name, (why, do) in UNSAFE.items()
        if given.get(name, "").strip().lower() not in OFF
    ]
    if given.get("VLLM_HOST_IP") in ("0.0.0.0", "::"):
        found.append(
            Finding(
                "error",
                "VLLM_HOST_IP is every address of this machine",
                "vLLM's workers then talk to each other, in pickles, on ports that the network can reach.",
                "Set it to 127.0.0.1, or to an address of a private network.",
            )
        )
    return found


def _secrets(given: Mapping[str, str]) -> list[Finding]:
    names = [name for name in SECRETS if given.get(name)]
    if not names:
        return []
    return [
        Finding(
            "note",
            f"{', '.join(names)} in the environment",
            "Every process that a run starts inherits it, samplers and reward functions included.",
            "Unset it for runs that need no download or upload. Its value is not shown here.",
        )
    ]


def _threads(given: Mapping[str, str], cpus: int) -> list[Finding]:
    text = given.get("OMP_NUM_THREADS", "")
    processes = _number(given.get("LOCAL_WORLD_SIZE", "")) or 1
    if not text:
        if cpus == 1:
            return []
        return [
            Finding(
                "note",
                f"OMP_NUM_THREADS is not set, and there are {cpus} cores",
                "Each process of torch then takes them all; ranks, samplers and Ray's workers fight over them.",
                f"With more than one process set it to {cpus} divided by their number.",
            )
        ]
    threads = _number(text)
    if threads is None:
        return [
            Finding(
                "warning", "OMP_NUM_THREADS is no number", "torch then takes every core in each process.",
                f"Set it to a number from 1 to {cpus}.",
            )
        ]  # fmt: skip
    if threads * processes > cpus:
        return [
            Finding(
                "warning",
                f"{threads} threads × {processes} processes on {cpus} cores",
                "Threads that wait for each other can make a step ten times slower.",
                f"Set OMP_NUM_THREADS to {max(1, cpus // processes)}.",
            )
        ]
    return []


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) > 0 else None


def usable_cpus(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: by affinity, and by its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or `max`
        return count
