"""The other Python: where vLLM is installed, and what its process is started with."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import trustrl
from trustrl.engines.vllm.options import CPU_ENVIRONMENT
from trustrl.errors import ConfigError

VARIABLE = "TRUSTRL_VLLM_PYTHON"

_QUESTION = """
import importlib.metadata, importlib.util, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
has = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "trustrl", "jaxtyping")}
print(json.dumps({"ray": version("ray"), "python": platform.python_version(), **has}))
"""


def python_of(given: str | None) -> str:
    """The Python of vLLM's environment.

    Args:
        given: `rollout.engine_kwargs.vllm_cpu.python`; the variable `TRUSTRL_VLLM_PYTHON` where it is None.

    Raises:
        ConfigError: neither names an executable file.
    """
    found = given or os.environ.get(VARIABLE)
    if not found:
        raise ConfigError(
            f"{VARIABLE} must be the Python of an environment with vLLM, and it is not set. verl and vLLM need "
            "different versions of transformers: make a second environment from environments/trl-vllm.txt and set the "
            "variable to its bin/python, or use actor_rollout_ref.rollout.name=transformers_cpu."
        )
    if not os.access(found, os.X_OK) or Path(found).is_dir():
        name = "rollout.engine_kwargs.vllm_cpu.python" if given else VARIABLE
        raise ConfigError(f"{name} must be an executable Python, got {found!r}. Give its full path: .../bin/python.")
    return found


def runtime_env(given: str | None) -> dict[str, Any]:
    """Ray's `runtime_env` for the vLLM server.

    Raises:
        ConfigError: the environment cannot run it.
    """
    python = python_of(given)
    variables = {
        **CPU_ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONPATH": source_root(),
    }
    check(python, variables["PYTHONPATH"])
    return {"py_executable": python, "env_vars": variables}


def source_root() -> str:
    """The folder to import this trustrl from; empty where it would bring verl's packages along."""
    root = Path(trustrl.__file__).parents[1]
    return "" if (root / "torch").exists() else str(root)


def check(python: str, path: str) -> None:
    """Asks the environment, without importing anything large, whether an actor of ours can live there.

    Raises:
        ConfigError: it is missing a package, or has another Ray or Python than this one.
    """
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, timeout=60, env=environment)
    if run.returncode:
        raise ConfigError(f"{python} must be a Python that starts, got: {run.stderr.strip()[-300:]}")
    found = json.loads(run.stdout)
    for name in ("vllm", "trustrl", "jaxtyping"):
        if not found[name]:
            raise ConfigError(
                f"{name} must be installed for {python}, and it is not. Run `{python} -m pip install {name}`."
            )
    minor = ".".join(platform.python_version_tuple()[:2])
    if not found["python"].startswith(f"{minor}."):
        raise ConfigError(
            f"{python} must be Python {minor}, as it is here, got {found['python']}. Ray connects no two of them."
        )
    ours = metadata.version("ray")
    if found["ray"] != ours:
        raise ConfigError(
            f"ray must be {ours} for {python}, as it is here, got {found['ray'] or 'none'}. "
            f"Run `{python} -m pip install ray=={ours}`."
        )
