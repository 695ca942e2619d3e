"""Weight reload for a model that vLLM has packed for the CPU's matrix kernels.

Four things go wrong if a trainer's weights are loaded without this module, and only the first raises an exception:

1. Packed layers no longer have the loaders that `load_weights` uses. vLLM's layer-wise reload restores them for a
   while.
2. That reload repacks only the layers that it has loaded. A tied head shares the embedding's weight and is not loaded
   separately, so it keeps multiplying by its old packed copy (an error of one nat and more).
3. vLLM packs the experts of an MoE layer only while the layer has no kernel. A reload leaves plain weights where the
   kernel reads packed ones (8 to 10 nats).
4. vLLM reuses cached prefixes that were computed with the old weights.

On a GPU nothing is packed: a tied head reads the weight that was just loaded, and expert kernels do not change.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trustrl.engines.vllm.options import on_cpu
from trustrl.errors import EngineError

Weights = Iterable[tuple[str, Tensor]]
_KERNEL = "trustrl_kernel_before_reload"


def model_runner_of(llm: Any) -> Any:
    """Returns the object that holds the model, if the engine runs in this process.

    Raises:
        EngineError: If the engine runs in another process.
    """
    try:
        return llm.llm_engine.model_executor.driver_worker.model_runner
    except AttributeError:
        raise EngineError(
            "vLLM's engine must run in this process, got one in another. Set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "before vllm is imported, or send weights with trustrl.engines.vllm.gloo_transfer."
        ) from None


@contextmanager
def reloaded(runner: Any) -> Iterator[None]:
    """Makes `runner.model.load_weights` accept any part of a checkpoint while active. Packs all layers at the end.

    If loading fails, the layers are packed with the weights that they have, so the engine can still be shut down.
    """
    model = runner.model
    with import_module("vllm.config").set_current_vllm_config(runner.vllm_config):
        begin_reload(model)
        try:
            with _keeping_copies(model):
                yield
        finally:
            end_reload(model, runner.model_config)


def begin_reload(model: nn.Module) -> None:
    """Restores the loaders of every layer and, on a CPU, makes vLLM pack the experts again."""
    import_module("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(model)
    for method in _expert_methods(model) if on_cpu() else []:
        if method.moe_kernel is not None:
            setattr(method, _KERNEL, method.moe_kernel)
            # vLLM packs experts only while the layer has no kernel.
            method.moe_kernel = None


@torch.no_grad()
def end_reload(model: nn.Module, model_config: Any) -> None:
    """Packs the loaded layers and, on a CPU, the heads that share a weight with one of them."""
    import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(model, model_config)
    for method in _expert_methods(model):
        before = vars(method).pop(_KERNEL, None)
        if method.moe_kernel is None:  # this layer received no new weights, and its packed ones are restored
            method.moe_kernel = before
    for head in tied_heads(model) if on_cpu() else []:
        # A tied head is not loaded by itself, and would multiply by its packed copy of the weights before.
        head.quant_method.process_weights_after_loading(head)


def _expert_methods(model: nn.Module) -> list[Any]:
    """Returns the objects that hold the expert kernels of a model's MoE layers."""
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


def tied_heads(model: nn.Module) -> list[Any]:
    """Returns the output layers that share their weight with another module."""
    head_class = import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
    modules = list(model.modules())
    return [
        head
        for head in modules
        if isinstance(head, head_class)
        and any(other is not head and getattr(other, "weight", None) is head.weight for other in modules)
    ]


@contextmanager
def _keeping_copies(model: Any) -> Iterator[None]:
    """Makes `load_weights` copy each tensor while active.

    A padded layer is loaded only at the end, and by then a trainer may have unmerged its adapters from the tensor.
    """
    load: Callable[[Weights], Any] = model.load_weights
    model.load_weights = lambda weights: load((name, tensor.clone()) for name, tensor in weights)
    try:
        yield
    finally:
        del model.load_weights


def forget_prefixes(llm: Any) -> None:
    """Empties the prefix cache.

    Raises:
        EngineError: If vLLM refuses, as it does while requests are running.
    """
    must_have_reset(llm.reset_prefix_cache())


def must_have_reset(done: bool) -> None:
    """Raises if vLLM reports that it has not emptied its prefix cache.

    Raises:
        EngineError: If `done` is False.
    """
    if not done:
        raise EngineError(
            "vLLM's prefix cache must be emptied after a weight update, and vLLM refused. "
            "Let running requests finish, or pause generation, before you send weights."
        )
