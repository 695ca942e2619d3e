"""Environment variables that weaken security or slow a run down. Their values are never printed."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trustrl.tools.doctor import Finding

OFF = ("", "0", "false", "no", "off")
UNSAFE = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (
        "vLLM unpickles the data it receives, and a pickle can run arbitrary code.",
        "Unset it unless the server is bound to loopback and weight sync requires it.",
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": (
        "Anyone who can reach the server can make it load adapters from any path.",
        "Unset it unless the server is bound to loopback.",
    ),
    "VLLM_SERVER_DEV_MODE": (
        "The server exposes routes that change its weights, put it to sleep, and reset it.",
        "trustrl's weight sync requires it; in that case, bind the server to 127.0.0.1. Otherwise, unset it.",
    ),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": (
        "torch.load unpickles whole checkpoints, and a pickle can run arbitrary code.",
        "Unset it, and load only checkpoints that you created.",
    ),
    "HF_DATASETS_TRUST_REMOTE_CODE": (
        "Older versions of datasets run the code that ships with a dataset.",
        "Unset it, and use datasets in Parquet format.",
    ),
}
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")


def check(environment: Mapping[str, str] | None = None, cpus: int | None = None) -> list[Finding]:
    """Checks for insecure settings, for secrets that child processes inherit, and for too many threads."""
    variables = os.environ if environment is None else environment
    return [*_unsafe(variables), *_secrets(variables), *_threads(variables, cpus or usable_cpus())]


def _unsafe(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, (why, do) in UNSAFE.items():
        if variables.get(name, "").strip().lower() not in OFF:
            yield Finding("warning", f"{name} is set", why, do)
    if variables.get("VLLM_HOST_IP") in ("0.0.0.0", "::"):
        yield Finding(
            "error",
            "VLLM_HOST_IP binds every address of this machine",
            "vLLM's workers exchange pickles on ports that the network can reach.",
            "Set it to 127.0.0.1 or to an address on a private network.",
        )


def _secrets(variables: Mapping[str, str]) -> Iterator[Finding]:
    if names := [name for name in SECRETS if variables.get(name)]:
        yield Finding(
            "note",
            f"{', '.join(names)} in the environment",
            "Every process that a run starts inherits it, including samplers and reward functions.",
            "Unset it for runs that do not download or upload. trustrl does not print its value.",
        )


def _threads(variables: Mapping[str, str], cpus: int) -> Iterator[Finding]:
    text = variables.get("OMP_NUM_THREADS", "")
    processes = _number(variables.get("LOCAL_WORLD_SIZE", "")) or 1
    threads = _number(text)
    if not text and cpus > 1:
        yield Finding(
            "note",
            f"OMP_NUM_THREADS is not set on a machine with {cpus} cores",
            "Each torch process uses all of them, so ranks, samplers, and Ray workers compete for cores.",
            f"If you start several processes, set it to {cpus} divided by their number.",
        )
    elif text and threads is None:
        yield Finding(
            "warning", "OMP_NUM_THREADS is not a number", "Each torch process uses every core.",
            f"Set it to a number from 1 to {cpus}.",
        )  # fmt: skip
    elif threads is not None and threads * processes > cpus:
        yield Finding(
            "warning",
            f"{threads} threads × {processes} processes on {cpus} cores",
            "Threads that compete for cores can make a step ten times slower.",
            f"Set OMP_NUM_THREADS to {max(1, cpus // processes)}.",
        )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) > 0 else None


def usable_cpus(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores this process may use, given its CPU affinity and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # not in a cgroup, or the quota is `max`
        return count
