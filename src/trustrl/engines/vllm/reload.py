"""Weight reload for a model that vLLM has packed for the CPU's matrix kernels.

Four things go wrong when a trainer's weights are loaded the plain way, and only the first is an exception:

1. packed layers have lost the loaders `load_weights` looks for; vLLM's layer-wise reload puts them back for a while;
2. that reload repacks the layers it has loaded. A tied head shares the embedding's weight and is loaded by nobody, so
   it keeps multiplying by its old packed copy (an error of one nat and more);
3. vLLM packs the experts of an MoE layer only while the layer has no kernel. A reload leaves plain weights where the
   kernel reads packed ones (8 to 10 nats);
4. cached prefixes were computed with the old weights and are used again.

On a GPU nothing is packed: a tied head reads the weight that was just loaded, and expert kernels are left alone.
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
    """The object that holds the model, when the engine lives in this process.

    Raises:
        EngineError: it lives in another one.
    """
    try:
        return llm.llm_engine.model_executor.driver_worker.model_runner
    except AttributeError:
        raise EngineError(
            "vLLM's engine must live in this process, got one in another. Set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "before vllm is imported, or send weights with trustrl.engines.vllm.gloo_transfer."
        ) from None


@contextmanager
def reloaded(runner: Any) -> Iterator[None]:
    """Inside, `runner.model.load_weights` may be called with any part of a checkpoint; afterwards all is packed again.

    If loading fails the layers are put together again with whatever they had, so the engine can still be shut down.
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
    """Gives every layer its loaders back and, on a CPU, makes vLLM pack the experts again."""
    import_module("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(model)
    for method in _expert_methods(model) if on_cpu() else []:
        if method.moe_kernel is not None:
            setattr(method, _KERNEL, method.moe_kernel)
            method.moe_kernel = None


@torch.no_grad()
def end_reload(model: nn.Module, model_config: Any) -> None:
    """Packs what has been loaded and, on a CPU, the heads that share a weight with a layer that has."""
    import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(model, model_config)
    for method in _expert_methods(model):
        before = vars(method).pop(_KERNEL, None)
        if method.moe_kernel is None:  # no new weights came for this layer, which has its packed ones back
            method.moe_kernel = before
    for head in tied_heads(model) if on_cpu() else []:
        head.quant_method.process_weights_after_loading(head)


def _expert_methods(model: nn.Module) -> list[Any]:
    """Returns the objects that hold the expert kernels of a model's MoE layers."""
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


def tied_heads(model: nn.Module) -> list[Any]:
    """Output layers whose weight is another module's."""
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
    """A padded layer is loaded only at the end; by then a trainer may have unmerged its adapters from the tensor."""
    load: Callable[[Weights], Any] = model.load_weights
    model.load_weights = lambda weights: load((name, tensor.clone()) for name, tensor in weights)
    try:
        yield
    finally:
        del model.load_weights


def forget_prefixes(llm: Any) -> None:
    """Empties the prefix cache.

    Raises:
        EngineError: vLLM refused, as it does while requests are running.
    """
    must_have_reset(llm.reset_prefix_cache())


def must_have_reset(done: bool) -> None:
    """Raises unless vLLM says that it has emptied its prefix cache."""
    if not done:
        raise EngineError(
            "vLLM's prefix cache must be emptied after new weights, and vLLM refused. "
            "Let running requests finish, or pause generation, before weights are sent."
        )
