"""Weight sync between TRL's trainer and the vLLM engine in the same process, with verification.

Seam:     `VLLMGeneration.sync_weights`, replaced on one instance; TRL's own loop over the parameters runs inside
Needs:    on a CPU, the reload of `trustrl.engines.vllm.weight_reload`; on a GPU, TRL's loop is correct as it is
Borrowed: TRL's names, gathering, and adapter merging
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustrl.config.validators import real
from trustrl.engines.vllm.options import on_cpu
from trustrl.engines.vllm.scoring import score_rollout
from trustrl.engines.vllm.weight_reload import forget_prefixes, model_runner_of, reloaded
from trustrl.errors import EngineError


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
