"""Experts that vLLM's routers chose at each sampled token of a mixture of experts.

vLLM returns them as `CompletionOutput.routed_experts`, of shape (prompt + completion − 1, layers, experts per token),
if it is built with `enable_return_routed_experts=True`. Its CPU build refuses that setting: only Model Runner V2 fills
the field, and that runner needs Triton. `fill_on_cpu` fills the same field there, with the ids that vLLM's own routers
report to `bind_routed_experts_capturer`.

Seams on a CPU: `bind_routed_experts_capturer(model, capturer)`, the runner's `execute_model(scheduler_output)`, and the
scheduler's `aux_output_connector`, which is None there.
"""

import functools
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from trustrl.engines.vllm.decode_record import DecodedLogprobs
from trustrl.engines.vllm.options import on_cpu
from trustrl.engines.vllm.weight_reload import model_runner_of
from trustrl.errors import ConfigError, EngineError

OPTION = "enable_return_routed_experts"
"""vLLM's own setting."""


def routing_options() -> dict[str, Any]:
    """Returns the arguments with which `LLM` returns routed experts; none on a CPU, where `fill_on_cpu` does."""
    return {} if on_cpu() else {OPTION: True}


def record_routing(llm: Any) -> None:
    """Makes `llm.generate` keep each completion's routed experts with its `DecodedLogprobs`.

    Raises:
        ConfigError: If the model is not a mixture of experts.
        EngineError: If the installed vLLM does not report its routing.
    """
    if not llm.model_config.is_moe:
        raise ConfigError(
            "recording.experts must be False for a dense model, got True. Only a mixture of experts routes its tokens."
        )
    if on_cpu():
        fill_on_cpu(llm)
    generate = llm.generate

    @functools.wraps(generate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        for output in outputs:
            for completion in output.outputs:
                if isinstance(completion.logprobs, DecodedLogprobs):
                    completion.logprobs.experts = at_tokens(completion)
        return outputs

    llm.generate = recorded


def routed_llm(model: str, options: dict[str, Any]) -> tuple[Any, bool]:
    """Returns an `LLM` that fills `CompletionOutput.routed_experts` if it can, and whether it does.

    Args:
        model: The model's name or folder.
        options: Arguments of `LLM`.
    """
    llm: Any = import_module("vllm").LLM
    if not on_cpu():
        try:
            return llm(model, **options, **routing_options()), True
        except ValueError:  # a dense model, or a parallel layout for which vLLM does not collect the routing
            return llm(model, **options), False
    made = llm(model, **options)
    if made.model_config.is_moe:
        fill_on_cpu(made)
    return made, made.model_config.is_moe


def at_tokens(completion: Any) -> np.ndarray:
    """Returns the (T, layers × experts per token) int16 experts behind each token's log-prob, layer by layer.

    The log-prob of a token comes from the forward pass over the token before it, so the rows begin at the last token
    of the prompt.

    Args:
        completion: vLLM's `CompletionOutput`.

    Raises:
        EngineError: If vLLM returned too few rows.
    """
    rows, wanted = completion.routed_experts, len(completion.token_ids)
    if rows is None or len(rows) < wanted:
        got = None if rows is None else len(rows)
        raise EngineError(
            f"vLLM must return the experts of each of {wanted} sampled tokens, got {got} rows. Build it with "
            f"{OPTION}=True, or set recording.experts=False."
        )
    return np.asarray(rows[len(rows) - wanted :]).astype(np.int16).reshape(wanted, -1)


def fill_on_cpu(llm: Any) -> None:
    """Makes a vLLM in this process, on a CPU, fill `CompletionOutput.routed_experts`. Later calls have no effect.

    Rows of prompt tokens that the prefix cache holds are missing, and the others keep their order.

    Raises:
        EngineError: If the engine runs in another process or schedules in another way than this function supports.
    """
    runner = model_runner_of(llm)
    scheduler: Any = getattr(llm.llm_engine.engine_core.engine_core, "scheduler", None)
    connector = getattr(scheduler, "aux_output_connector", _MISSING)
    if isinstance(connector, _CpuRouting):
        return
    capturer: Any = import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    if connector is not None or not hasattr(capturer, "bind_routed_experts_capturer"):
        raise EngineError(
            "vLLM's scheduler has no unused aux_output_connector. Install a vllm version listed "
            "in trustrl's documentation, or set recording.experts=False."
        )
    routing = _CpuRouting(*capturer._get_routed_experts_shape(runner.vllm_config)[::2])
    capturer.bind_routed_experts_capturer(runner.model, routing)
    routing.follow(runner)
    scheduler.aux_output_connector = routing


_MISSING = object()


class _CpuRouting:
    """Routed experts by request and position. vLLM calls it as its capturer and as its scheduler's connector."""

    def __init__(self, num_layers: int, experts_per_token: int) -> None:
        self._shape = (num_layers, experts_per_token)
        self._step: dict[int, Tensor] = {}
        self._rows: dict[str, dict[int, np.ndarray]] = {}
        self._sent: dict[str, int] = {}

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Keeps one layer's routing of the running step."""
        self._step[layer_id] = topk_ids.clone()

    def follow(self, runner: Any) -> None:
        """Assigns the rows of each step to the requests in the batch."""
        execute = runner.execute_model

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._step.clear()
            result = execute(scheduler_output, *args, **kwargs)
            if self._step and scheduler_output.num_scheduled_tokens:
                self._assign(runner.input_batch, scheduler_output.num_scheduled_tokens)
            return result

        runner.execute_model = execute_model

    def _assign(self, batch: Any, scheduled: dict[str, int]) -> None:
        rows = np.zeros((sum(scheduled.values()), *self._shape), np.int16)
        for layer, ids in self._step.items():
            rows[:, layer] = ids[: len(rows)].numpy()
        start = 0
        for index, request_id in enumerate(batch.req_ids):
            first, count = int(batch.num_computed_tokens_cpu[index]), scheduled[request_id]
            positions = range(first, first + count)
            known = self._rows.setdefault(request_id, {})
            known.update(zip(positions, rows[start : start + count], strict=True))
            start += count

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """Returns nothing: the runner is in this process."""

    def take_output(self, request: Any, output: Any) -> np.ndarray | None:
        """Returns the rows of a request since its last call: all tokens but the newest, which was not run yet."""
        known, end = self._rows[request.request_id], request.num_tokens - 1
        sent = self._sent.get(request.request_id, 0)
        rows = [known[position] for position in range(sent, end) if position in known]
        self._sent[request.request_id] = end
        return np.stack(rows) if rows else None

    def request_finished(self, request: Any) -> None:
        """Deletes the rows of a request."""
        self._rows.pop(request.request_id, None)
        self._sent.pop(request.request_id, None)

    def reset(self) -> None:
        """Keeps everything: the rows do not depend on the prefix cache."""
