"""Weight sync between TRL's trainer and the vLLM engine in the same process, and the reload that a CPU needs for it.

vLLM packs weights for the CPU's matrix kernels. Four things go wrong if a trainer's weights are loaded without this
module, and only the first raises an exception:

1. Packed layers no longer have the loaders that `load_weights` uses. vLLM's layer-wise reload restores them for a
   while.
2. That reload repacks only the layers that it has loaded. A tied head shares the embedding's weight and is not loaded
   separately, so it keeps multiplying by its old packed copy (an error of one nat and more).
3. vLLM packs the experts of an MoE layer only while the layer has no kernel. A reload leaves plain weights where the
   kernel reads packed ones (8 to 10 nats).
4. vLLM reuses cached prefixes that were computed with the old weights.

On a GPU nothing is packed: a tied head reads the weight that was just loaded, and expert kernels do not change.

Seam:     `VLLMGeneration.sync_weights`, replaced on one instance; TRL's own loop over the parameters runs inside
Borrowed: TRL's names, gathering, and adapter merging
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trustrl.config.validators import real
from trustrl.engines.vllm.options import on_cpu
from trustrl.engines.vllm.scoring import score_rollout
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


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Measurements of one weight sync."""

    seconds: float
    """Duration, without the verification."""

    mean_gap: float | None = None
    """Mean |log-prob of the sampler − log-prob of the trainer| over the probe's tokens, nats, if it was verified."""

    max_gap: float | None = None


class SamplerSync:
    """Replacement for the `sync_weights` of one `VLLMGeneration`."""

    last: SyncReport | None = None
    """The latest sync, or None before the first."""

    def __init__(self, generation: Any, verify_within: float | None) -> None:
        self._generation = generation
        self._verify_within = verify_within
        self._inner = generation.sync_weights
        self._reloads = generation.mode == "colocate" and on_cpu()

    def __call__(self) -> None:
        """Syncs the weights, and verifies the sync if requested.

        Raises:
            EngineError: If the sampler's log-probs differ from the trainer's afterwards.
        """
        start = time.perf_counter()
        if self._reloads:
            # TRL's plain `load_weights` fails on weights that vLLM has packed for the CPU.
            with reloaded(model_runner_of(self._generation.llm)):
                self._inner()
            # Cached prefixes were computed with the weights before this sync.
            forget_prefixes(self._generation.llm)
        else:
            self._inner()
        seconds = time.perf_counter() - start
        self.last = SyncReport(seconds)
        if self._verify_within is not None:
            gap = probe_gap(self._generation)
            mean, largest = gap.mean().item(), gap.max().item()
            self.last = SyncReport(seconds, mean, largest)
            if not largest <= self._verify_within:  # `not <=`, so that NaN fails too
                raise EngineError(
                    f"The sampler's log-probs must be within {self._verify_within:g} nats of the trainer's after a "
                    f"weight sync, got a gap of {largest:.3g} (mean {mean:.3g}). A weight was not synced, or the two "
                    "have different dtypes: float32 allows about 1e-3, bfloat16 about 0.5."
                )


def install_sync(generation: Any, *, verify_within: float | None = None) -> SamplerSync | None:
    """Makes one `VLLMGeneration` (a trainer's `vllm_generation`) sync its weights correctly on a CPU.

    On other platforms and in server mode, TRL's own sync is correct. Without `verify_within`, it is not changed there.

    Args:
        generation: TRL's `VLLMGeneration`.
        verify_within: Largest difference in nats at any token. After every sync, two short sequences are scored with
            the sampler and with the trainer's model. Costs one small forward pass on every rank. None does not verify.

    Returns:
        The new sync, with its `last` report; None if TRL's own sync was not changed.

    Raises:
        EngineError: If it was already called for this `VLLMGeneration`.
    """
    if isinstance(generation.sync_weights, SamplerSync):
        raise EngineError("install_sync must be called once per VLLMGeneration, and it already was for this one.")
    if verify_within is not None:
        real("verify_within", verify_within, rule="a number of nats > 0", low=0.0)
    sync = SamplerSync(generation, verify_within)
    if verify_within is None and not sync._reloads:
        return None
    if sync._reloads:
        model_runner_of(generation.llm)  # fails here rather than at the first step
    generation.sync_weights = sync
    return sync


def probe_gap(generation: Any) -> Tensor:
    """Returns |log p of the sampler − log p of the trainer| at the tokens of two fixed pseudo-random sequences."""
    model = generation.model
    size = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(size, (length,), generator=draw).tolist() for length in (9, 24)]
    scores = score_rollout(generation, sequences, [1] * len(sequences), k=0)
    was_training = model.training
    model.eval()
    try:
        trainer = [_logps(model, torch.tensor([ids], device=generation.accelerator.device)) for ids in sequences]
    finally:
        model.train(was_training)
    return torch.cat([(scores.logp[row, : len(ours)] - ours).abs() for row, ours in enumerate(trainer)])


@torch.no_grad()
def _logps(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
