"""vLLM as verl's sampler on a CPU, in a separate environment, because it needs a different transformers than verl.

Both environments import this module. vLLM is imported only where it runs, and verl is not imported at all.
"""

import json
import os
import platform
import subprocess
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import trustrl
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.vllm.options import CPU_ENVIRONMENT, cpu_options
from trustrl.engines.vllm.routed_experts import fill_on_cpu
from trustrl.engines.vllm.sampler_adapter import VLLMAdapter
from trustrl.engines.vllm.scoring import score
from trustrl.engines.vllm.weight_reload import forget_prefixes, model_runner_of, reloaded
from trustrl.errors import ConfigError, EngineError
from trustrl_verl_cpu.sampler_server import Answer, BatchingServer, Bucket, Limits, Request, scores

VARIABLE = "TRUSTRL_VLLM_PYTHON"
"""The environment variable with the Python of vLLM's environment."""

_QUESTION = """
import importlib.metadata, importlib.util, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ("vllm", "trustrl_verl_cpu", "trustrl", "jaxtyping")
has = {name: importlib.util.find_spec(name) is not None for name in names}
print(json.dumps({"ray": version("ray"), "python": platform.python_version(), **has}))
"""


def python_of(setting: str | None) -> str:
    """Returns the Python of vLLM's environment.

    Args:
        setting: `rollout.engine_kwargs.vllm_cpu.python`. If it is None, the variable `TRUSTRL_VLLM_PYTHON` is used.

    Raises:
        ConfigError: If neither names an executable file.
    """
    python = setting or os.environ.get(VARIABLE)
    if not python:
        raise ConfigError(
            f"{VARIABLE} is not set. It must be the Python of an environment with vLLM. verl and vLLM need "
            "different versions of transformers. Create a second environment from environments/trl-vllm.txt and set "
            "the variable to its bin/python, or use actor_rollout_ref.rollout.name=transformers_cpu."
        )
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        name = "rollout.engine_kwargs.vllm_cpu.python" if setting else VARIABLE
        raise ConfigError(f"{name} must be an executable Python, got {python!r}. Set its full path: .../bin/python.")
    return python


def runtime_env(setting: str | None) -> dict[str, Any]:
    """Returns Ray's `runtime_env` for the vLLM server.

    Raises:
        ConfigError: If the environment cannot run the server.
    """
    python = python_of(setting)
    variables = {
        **CPU_ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONPATH": source_root(),
    }
    check(python, variables["PYTHONPATH"])
    return {"py_executable": python, "env_vars": variables}


def source_root() -> str:
    """Returns the search path of trustrl and of this package, without folders that also hold verl's packages."""
    roots = dict.fromkeys(Path(file).parents[1] for file in (trustrl.__file__, __file__))
    return os.pathsep.join(str(root) for root in roots if not (root / "torch").exists())


def check(python: str, path: str) -> None:
    """Checks that the environment can run a trustrl actor, without importing large packages.

    Raises:
        ConfigError: If a package is missing, or if Ray or Python has a different version than here.
    """
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, timeout=60, env=environment)
    if run.returncode:
        raise ConfigError(f"{python} must be a Python that starts, got an error: {run.stderr.strip()[-300:]}")
    reply = json.loads(run.stdout)
    for module in ("vllm", "trustrl_verl_cpu", "trustrl", "jaxtyping"):
        if not reply[module]:
            name = module.replace("_", "-")
            raise ConfigError(f"{name} is not installed for {python}. Run `{python} -m pip install {name}`.")
    minor = ".".join(platform.python_version_tuple()[:2])
    if not reply["python"].startswith(f"{minor}."):
        raise ConfigError(
            f"{python} must be Python {minor}, as it is here, got {reply['python']}. Ray does not connect "
            "different versions. Create the environment with this Python."
        )
    ours = metadata.version("ray")
    if reply["ray"] != ours:
        raise ConfigError(
            f"ray must be {ours} for {python}, as it is here, got {reply['ray'] or 'none'}. "
            f"Run `{python} -m pip install ray=={ours}`."
        )


class VLLMServer(BatchingServer):
    """Server that samples and scores with vLLM's `LLM` in this process.

    Args:
        path: The model's folder.
        limits: Lengths of prompts and responses.
        batch_size: The largest number of requests that are answered together.
        options: Arguments of `LLM`.
        routing: Whether answers contain the experts that the routers chose, for verl's router replay.
    """

    def __init__(
        self, path: str, limits: Limits, *, batch_size: int, options: dict[str, Any], routing: bool = False
    ) -> None:
        super().__init__(limits, batch_size)
        self._path, self._options, self._routing = path, options, routing
        self._reload: ExitStack | None = None
        self._loaded = 0

    def _start(self) -> None:
        options = {
            "max_logprobs": -1,  # the region sets how many ids are recorded
            "max_model_len": self._limits.total + 1,  # scoring a sequence also samples a token
            "max_num_seqs": self._batch_size,
            "disable_log_stats": True,
            **cpu_options(dtype=self._options.get("dtype", "float32")),
            **self._options,
            # The ratio needs the log-probs of the sampling distribution, at every temperature.
            "logprobs_mode": "processed_logprobs",
        }
        if self._routing:
            options["enable_prefix_caching"] = False  # the routers do not see tokens that the cache holds
        self._llm = import_module("vllm").LLM(model=self._path, **options)
        self._adapter = VLLMAdapter.of(self._llm.llm_engine.vllm_config)
        if self._routing:
            if not self._llm.model_config.is_moe:
                raise ConfigError(
                    "actor_rollout_ref.rollout.enable_rollout_routing_replay must be False for a dense model, got "
                    "True. Only a mixture of experts routes its tokens."
                )
            fill_on_cpu(self._llm)

    def _sampled(self, requests: list[Request]) -> list[Answer]:
        make: Any = import_module("vllm").SamplingParams
        parameters = []
        for request in requests:
            options = {"detokenize": False, **request.options, "temperature": request.temperature}
            own, _ = self._adapter.request(request.wanted, options)
            parameters.append(make(**{**own, "max_tokens": request.max_tokens}))
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
        return [self._answer(output) for output in outputs]

    def _answer(self, output: Any) -> Answer:
        completion = output.outputs[0]
        record, experts = self._adapter.record(completion, Wanted()), None
        if self._routing:
            # Not those of the record: verl's router replay needs the prompt's rows too.
            experts, rows = completion.routed_experts, len(output.prompt_token_ids) + len(completion.token_ids) - 1
            if experts is None or len(experts) != rows:
                raise EngineError(
                    f"vLLM must return the experts of {rows} tokens, got {0 if experts is None else len(experts)}. "
                    "Install a vllm version listed in trustrl's documentation, or set "
                    "enable_rollout_routing_replay=False."
                )
        return Answer(list(completion.token_ids), record.logp.tolist(), record.extra_fields(), routed_experts=experts)

    def _scored(self, requests: list[Request], k: int) -> list[Answer]:
        sequences = [request.prompt_ids for request in requests]
        record = score(self._llm, sequences, [1] * len(sequences), k)
        answers = []
        for row, sequence in enumerate(sequences):
            n = len(sequence) - 1
            if k:
                answers.append(scores(record.top_ids[row, :n].tolist(), record.top_logp[row, :n].tolist(), k))
            else:
                logps = record.logp[row, :n].tolist()
                answers.append(scores([[token] for token in sequence[1:]], [[logp] for logp in logps], k))
        return answers

    def _begin_weights(self) -> None:
        if self._reload is not None:
            self._reload.close()
        self._reload, self._loaded = ExitStack(), 0
        runner = model_runner_of(self._llm)
        self._reload.enter_context(reloaded(runner))
        self._runner = runner

    def _load_weights(self, bucket: Bucket) -> None:
        if self._reload is None:
            raise EngineError("load_weights came before begin_weights. Call that first.")
        tensors = bucket.tensors()
        self._runner.model.load_weights(iter(tensors))
        self._loaded += len(tensors)

    def _end_weights(self) -> None:
        reload, self._reload = self._reload, None
        if reload is None or not self._loaded:
            raise EngineError(
                f"Weights must be sent between begin_weights and end_weights, got {self._loaded} tensors."
            )
        reload.close()
        forget_prefixes(self._llm)
